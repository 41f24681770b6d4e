"""Engines for the contract suite: embedded, recorded, and real servers where they are asked for.

Real servers run with ``AGENT_RL_REAL_ENGINES=sglang,vllm`` (``make test-engines``): then a missing
environment or a server that does not start fails the run. With ``AGENT_RL_RECORD=1`` beside it the
recordings are written anew. A server is started once for the whole run.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
import torch
from contract_cases import CONTEXT_LENGTH, Reference, UnderTest
from wires import RecordingWire, ReplayWire, load_recording, save_recording

from agent_rl.config.schema import EngineConfig
from agent_rl.engines.http.deployment import Deployment
from agent_rl.engines.http.http_engine import HttpEngine
from agent_rl.engines.http.server_fleet import DIALECTS, free_ports
from agent_rl.engines.http.server_process import ServerProcess, engines_dir
from agent_rl.engines.http.serving_folder import prepare_serving_folder
from agent_rl.engines.http.transport import HttpTransport, TransportOptions
from agent_rl.engines.http.weight_reference import TransformersReference
from agent_rl.engines.local.local_engine import LocalEngine
from agent_rl.model.config_json import ServedModel, read_served_model
from agent_rl.model.random_policy import write_random_policy
from agent_rl.run.warmstart.train import TinyMoEShape

EngineKind = Literal["sglang", "vllm"]
RECORDINGS = Path(__file__).parent.parent / "recordings"
REAL: tuple[EngineKind, ...] = tuple(
    kind
    for kind in ("sglang", "vllm")
    if kind in os.environ.get("AGENT_RL_REAL_ENGINES", "").split(",")
)
RECORD = os.environ.get("AGENT_RL_RECORD") == "1"
KEEPS_ORDER = {"sglang": True, "vllm": False}
BLOCK_SIZE = {"sglang": 1, "vllm": 32}
SHAPE = TinyMoEShape(hidden_size=64, num_layers=3, num_experts=16, moe_top_k=4)

collect_ignore_glob = [] if REAL else ["test_real_*.py"]
if "sglang" not in REAL:
    collect_ignore_glob.append("test_real_sglang_*.py")


@dataclass(frozen=True)
class Policies:
    """Two policies of one shape: what servers start with, and what they are updated to."""

    before: Path
    after: Path
    reference_before: Reference
    reference_after: Reference
    model: ServedModel


@pytest.fixture(scope="session")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("policies")
    before = write_random_policy(root / "before", seed=11, shape=SHAPE)
    after = write_random_policy(root / "after", seed=12, shape=SHAPE)
    return Policies(before, after, Reference(before), Reference(after), read_served_model(before))


@dataclass
class RealServer:
    """A running server and the exchanges recorded with it."""

    kind: EngineKind
    process: ServerProcess
    work_dir: Path
    cases: dict[str, list[dict[str, object]]] = field(
        default_factory=dict[str, list[dict[str, object]]]
    )


StartServer = Callable[[EngineKind], RealServer]


@pytest.fixture(scope="session")
def start_server(
    policies: Policies, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartServer]:
    """One server a kind for the whole run; its start-up is paid once."""
    running: dict[EngineKind, RealServer] = {}

    def start(kind: EngineKind) -> RealServer:
        if kind not in running:
            work_dir = tmp_path_factory.mktemp(kind)
            folder = prepare_serving_folder(policies.before, work_dir / "serving")
            of_kind = deployment(kind, policies, work_dir)
            spec = DIALECTS[kind].spec(of_kind, folder, free_ports(1)[0])
            running[kind] = server = RealServer(kind, ServerProcess(spec), work_dir)
            server.process.start()
            asyncio.run(server.process.wait_healthy())
        return running[kind]

    yield start
    for server in running.values():
        asyncio.run(server.process.stop())
        if RECORD:
            save_recording(
                RECORDINGS / f"{server.kind}.json.gz", server.cases, f"real {server.kind} on CPU"
            )


def deployment(
    kind: EngineKind, policies: Policies, work_dir: Path, **settings: object
) -> Deployment:
    """One small server of ``policies.before``; ``settings`` replace keys of its configuration."""
    own = {"kind": kind, "dtype": "float32", "max_sessions": 64, "weight_transfer": transfer(kind)}
    config = EngineConfig(**(own | settings))
    return Deployment(config, policies.before, work_dir, context_length=CONTEXT_LENGTH, niceness=10)


def transfer(kind: EngineKind) -> str:
    return "tensors" if kind == "sglang" else "disk"


OpenEngine = Callable[[str, str], AbstractAsyncContextManager[UnderTest]]


@pytest.fixture
def open_engine(policies: Policies, tmp_path: Path, start_server: StartServer) -> OpenEngine:
    """``open_engine(engine, case)``: an engine of that name, connected, for one case."""

    def wrap(generator: object, kind: str) -> UnderTest:
        return UnderTest(
            generator,
            policies.reference_before,
            policies.reference_after,
            keeps_order=KEEPS_ORDER.get(kind, True),
            block_size=BLOCK_SIZE.get(kind, 1),
        )

    async def connect(kind: EngineKind, transport: HttpTransport) -> HttpEngine:
        return await HttpEngine.connect(
            DIALECTS[kind].connect(transport, policies.model),
            policies.model,
            deployment(kind, policies, tmp_path),
            name=kind,
            reference=TransformersReference(policies.before),
        )

    @asynccontextmanager
    async def open_local() -> AsyncIterator[UnderTest]:
        engine = LocalEngine(
            policies.before,
            EngineConfig(dtype="float32", max_sessions=16),
            max_tokens=CONTEXT_LENGTH,
        )
        try:
            yield wrap(engine, "local")
        finally:
            await engine.aclose()

    @asynccontextmanager
    async def open_recorded(kind: EngineKind, case: str) -> AsyncIterator[UnderTest]:
        exchanges = load_recording(RECORDINGS / f"{kind}.json.gz")[case]
        transport = HttpTransport("http://recorded", wire=ReplayWire(exchanges))
        engine = await connect(kind, transport)
        yield wrap(engine, kind)
        await engine.aclose()

    @asynccontextmanager
    async def open_real(server: RealServer, case: str) -> AsyncIterator[UnderTest]:
        kind = server.kind
        repository = str(Path(__file__).parents[4])
        hide = (str(server.work_dir.parent.parent), str(engines_dir()), repository)
        wire = RecordingWire(hide) if RECORD else None
        transport = HttpTransport(
            server.process.spec.url, TransportOptions(reply_timeout_s=300.0), wire
        )
        engine = await connect(kind, transport)
        try:
            yield wrap(engine, kind)
        finally:
            await engine.aclose()
            if wire is not None:
                server.cases[case] = wire.exchanges

    def open_named(engine: str, case: str) -> AbstractAsyncContextManager[UnderTest]:
        if engine == "local":
            return open_local()
        how, _, kind = engine.partition("-")
        assert kind in DIALECTS
        return open_real(start_server(kind), case) if how == "real" else open_recorded(kind, case)

    return open_named
