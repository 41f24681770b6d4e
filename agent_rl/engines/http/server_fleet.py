"""Servers from a configuration: launched and supervised here, or attached to by URL.

Nothing starts when it is built; the first request, weight update or score starts every server and
probes it, so that a run can be assembled and checked before anything expensive happens.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from agent_rl.config.schema import RunConfig
from agent_rl.engines.balanced import BalancedEngine, BalancedOptions
from agent_rl.engines.http.engine_counters import EngineOptions
from agent_rl.engines.http.http_engine import HttpEngine
from agent_rl.engines.http.inference_server import InferenceServer
from agent_rl.engines.http.server_process import RestartPolicy, ServerSpec, Supervisor
from agent_rl.engines.http.serving_folder import prepare_serving_folder
from agent_rl.engines.http.transport import HttpTransport, TransportOptions
from agent_rl.engines.http.weight_reference import TransformersReference
from agent_rl.engines.sglang import SGLangLaunch, SGLangServer
from agent_rl.engines.vllm import VLLMLaunch, VLLMServer
from agent_rl.errors import EngineError
from agent_rl.model.config_json import ServedModel, read_served_model
from agent_rl.protocols import Weights
from agent_rl.store.owned_folder import OwnedFolder, ownerless
from agent_rl.types import Completion, Floats, GenerateRequest, TokenIds
from routing_cache import RowLayout

EngineKind = Literal["sglang", "vllm"]
_SERVING, _EXCHANGE = "serving", "weights"  # folders below the work folder
_TOLERANCES = {"float32": 1e-4, "bfloat16": 0.2}  # of a log-prob, from rounding alone


@dataclass(frozen=True)
class FleetSpec:
    """Engines of one kind.

    Args:
        kind: the dialect.
        policy: Hugging Face folder of the starting weights.
        work_dir: logs, serving folders and weight exchange go below it.
        urls: servers to attach to; empty launches ``num_servers`` here.
        dtype, context_length, max_running, num_threads, tensor_parallel, device: of a launched
            server.
        weight_transfer: see ``EngineOptions``; vLLM takes "disk" only.
        verify_weights: holds a float32 copy of the model here: for small ones.
    """

    kind: EngineKind
    policy: Path
    work_dir: Path
    urls: tuple[str, ...] = ()
    num_servers: int = 1
    dtype: str = "float32"
    context_length: int = 1024
    max_running: int = 64
    num_threads: int = 1
    tensor_parallel: int = 1
    device: str = "cpu"
    capture_routing: bool = True
    weight_transfer: Literal["tensors", "disk"] = "tensors"
    verify_weights: bool = True  # compare log-probs with transformers after every update
    niceness: int = 0
    start_timeout_s: float = 900.0
    extra_args: tuple[str, ...] = ()
    transport: TransportOptions = field(default_factory=TransportOptions)
    routed: BalancedOptions = field(default_factory=BalancedOptions)
    restarts: RestartPolicy = field(default_factory=RestartPolicy)


def fleet_spec(config: RunConfig, policy: Path) -> FleetSpec:
    """The servers that ``config.engine`` names; ``kind`` must be one that is served."""
    engine = config.engine
    if engine.kind == "local":
        raise EngineError("engine.kind=local is embedded: got local, expected sglang or vllm")
    return FleetSpec(
        kind=engine.kind,
        policy=policy,
        work_dir=Path(config.run_root).resolve() / "engines" / f"{config.name}-{os.getpid()}",
        urls=engine.urls,
        num_servers=engine.num_servers,
        dtype=engine.dtype,
        context_length=config.agent.max_tokens + 1,
        max_running=engine.max_sessions,
        num_threads=engine.num_threads,
        tensor_parallel=engine.tensor_parallel,
        device=engine.device,
        capture_routing=engine.capture_routing,
        weight_transfer=engine.weight_transfer,
        verify_weights=engine.verify_weights,
        start_timeout_s=engine.start_timeout_s,
        extra_args=engine.extra_args,
    )


class ServerFleet:
    """``Generator`` over all servers of ``spec``. Closing it stops what it launched."""

    def __init__(self, spec: FleetSpec) -> None:
        self.spec = spec
        self.model: ServedModel = read_served_model(spec.policy)
        self.supervisors: list[Supervisor] = []
        self._reference = TransformersReference(spec.policy) if spec.verify_weights else None
        self._routed: BalancedEngine | None = None
        self._starting = asyncio.Lock()
        self._folder: OwnedFolder | None = None

    @property
    def name(self) -> str:
        return self.spec.kind

    @property
    def row_layout(self) -> RowLayout:
        return self.model.layout

    @property
    def weight_version(self) -> int:
        return 0 if self._routed is None else self._routed.weight_version

    async def start(self) -> BalancedEngine:
        """Launch or attach, probe, and give the routed engine. Idempotent.

        Raises:
            EngineSetupError: a server cannot be trusted with replay; says what to change.
            EngineUnavailableError: a server did not come up; with the end of its log.
        """
        async with self._starting:
            if self._routed is None:
                self._own_folder()
                try:
                    self._routed = BalancedEngine(await self._connect_all(), self.spec.routed)
                except BaseException:
                    await self._stop_servers()
                    raise
            return self._routed

    async def generate(self, request: GenerateRequest) -> Completion:
        return await (await self.start()).generate(request)

    async def score(self, token_ids: TokenIds) -> Floats:
        return await (await self.start()).score(token_ids)

    async def end_session(self, session_id: str) -> None:
        if self._routed is not None:
            await self._routed.end_session(session_id)

    async def load_weights(self, weights: Weights, version: int) -> None:
        await (await self.start()).load_weights(weights, version)

    def metrics(self) -> dict[str, float]:
        """Counters of fleet, engines and servers; empty before the start."""
        if self._routed is None:
            return {}
        restarts = sum(supervisor.num_restarts for supervisor in self.supervisors)
        return self._routed.metrics() | {"fleet_server_restarts": float(restarts)}

    async def aclose(self) -> None:
        """Stop what was launched; logs stay, copies of weights do not. Idempotent."""
        routed, self._routed = self._routed, None
        try:
            if routed is not None:
                await routed.aclose()
        finally:
            await self._stop_servers()
        _remove_weights(self.spec.work_dir)
        if self._folder is not None:
            self._folder.close()

    def _own_folder(self) -> None:
        """Take the work folder, and remove the weights in those that killed processes left."""
        work_dir = self.spec.work_dir
        for folder in ownerless(work_dir.parent, f"{work_dir.name.rpartition('-')[0]}-*"):
            _remove_weights(folder)
        if self._folder is None:
            self._folder = OwnedFolder(work_dir)

    async def _connect_all(self) -> list[HttpEngine]:
        urls = list(self.spec.urls)
        if not urls:
            urls = await self._launch()
        return list(await asyncio.gather(*(self._connect(n, url) for n, url in enumerate(urls))))

    async def _launch(self) -> list[str]:
        spec = self.spec
        folder = await asyncio.to_thread(
            prepare_serving_folder, spec.policy, spec.work_dir / _SERVING
        )
        for port in free_ports(spec.num_servers):
            server_spec = replace(
                LAUNCHERS[spec.kind](spec, folder, port), start_timeout_s=spec.start_timeout_s
            )
            self.supervisors.append(Supervisor(server_spec, spec.restarts))
        await asyncio.gather(*(supervisor.start() for supervisor in self.supervisors))
        return [supervisor.process.spec.url for supervisor in self.supervisors]

    async def _connect(self, number: int, url: str) -> HttpEngine:
        spec = self.spec
        server = SERVERS[spec.kind](HttpTransport(url, spec.transport), self.model)
        options = EngineOptions(
            name=f"{spec.kind}-{number}",
            max_running=spec.max_running,
            capture_routing=spec.capture_routing,
            weight_transfer=spec.weight_transfer,
            exchange=spec.work_dir / _EXCHANGE,
            template=spec.policy,
            verify_tolerance=_TOLERANCES[spec.dtype],
        )
        return await HttpEngine.connect(
            server,
            self.model.layout,
            options,
            vocab_size=self.model.vocab_size,
            reference=self._reference,
        )

    async def _stop_servers(self) -> None:
        await asyncio.gather(*(supervisor.stop() for supervisor in self.supervisors))
        self.supervisors.clear()


def _remove_weights(work_dir: Path) -> None:
    for name in (_SERVING, _EXCHANGE):
        shutil.rmtree(work_dir / name, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on right now."""
    sockets: list[socket.socket] = []
    try:
        for _ in range(count):
            listener = socket.socket()
            sockets.append(listener)
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]
    finally:
        for listener in sockets:
            listener.close()


def _launch_sglang(spec: FleetSpec, folder: Path, port: int) -> ServerSpec:
    return SGLangLaunch(
        folder,
        port,
        dtype=spec.dtype,
        context_length=spec.context_length,
        max_running=spec.max_running,
        tensor_parallel=spec.tensor_parallel,
        capture_routing=spec.capture_routing,
        device=spec.device,
        num_threads=spec.num_threads,
        niceness=spec.niceness,
        extra_args=spec.extra_args,
    ).spec(spec.work_dir / "logs" / f"sglang-{port}.log")


def _launch_vllm(spec: FleetSpec, folder: Path, port: int) -> ServerSpec:
    if spec.weight_transfer != "disk":
        raise EngineError("vLLM takes weights from disk only: set weight_transfer=disk")
    return VLLMLaunch(
        folder,
        port,
        dtype=spec.dtype,
        context_length=spec.context_length,
        max_running=spec.max_running,
        tensor_parallel=spec.tensor_parallel,
        capture_routing=spec.capture_routing,
        device=spec.device,
        num_threads=spec.num_threads,
        niceness=spec.niceness,
        extra_args=spec.extra_args,
    ).spec(spec.work_dir / "logs" / f"vllm-{port}.log")


def _sglang_server(transport: HttpTransport, model: ServedModel) -> InferenceServer:
    return SGLangServer(transport, model.layout, model.vocab_size)


def _vllm_server(transport: HttpTransport, model: ServedModel) -> InferenceServer:
    return VLLMServer(transport, model.layout)


LAUNCHERS: dict[EngineKind, Callable[[FleetSpec, Path, int], ServerSpec]] = {
    "sglang": _launch_sglang,
    "vllm": _launch_vllm,
}
SERVERS: dict[EngineKind, Callable[[HttpTransport, ServedModel], InferenceServer]] = {
    "sglang": _sglang_server,
    "vllm": _vllm_server,
}
