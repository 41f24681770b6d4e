"""Servers from a configuration: launched and supervised here, or attached to by URL.

Nothing starts when it is built; the first request, weight update or score starts every server and
probes it, so that a run can be assembled and checked before anything expensive happens.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from agent_rl.engines.balanced import BalancedEngine
from agent_rl.engines.http.deployment import Deployment
from agent_rl.engines.http.http_engine import HttpEngine
from agent_rl.engines.http.inference_server import InferenceServer
from agent_rl.engines.http.server_process import ServerSpec, Supervisor
from agent_rl.engines.http.serving_folder import prepare_serving_folder
from agent_rl.engines.http.transport import HttpTransport
from agent_rl.engines.http.weight_reference import TransformersReference
from agent_rl.engines.sglang import SGLangServer, sglang_spec
from agent_rl.engines.vllm import VLLMServer, vllm_spec
from agent_rl.model.config_json import ServedModel, read_served_model
from agent_rl.protocols import Weights
from agent_rl.store.owned_folder import OwnedFolder, ownerless
from agent_rl.types import Completion, Floats, GenerateRequest, TokenIds
from routing_cache import RowLayout


class Dialect(NamedTuple):
    """One kind of server: its client, and the description of one to launch."""

    connect: Callable[[HttpTransport, ServedModel], InferenceServer]
    spec: Callable[[Deployment, Path, int], ServerSpec]  # of a model folder on a port


DIALECTS: dict[str, Dialect] = {
    "sglang": Dialect(SGLangServer, sglang_spec),
    "vllm": Dialect(VLLMServer, vllm_spec),
}


class ServerFleet:
    """``Generator`` over all servers of a deployment. Closing it stops what it launched."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.model: ServedModel = read_served_model(deployment.policy)
        self.supervisors: list[Supervisor] = []
        verifies = deployment.config.verify_weights
        self._reference = TransformersReference(deployment.policy) if verifies else None
        self._engine: BalancedEngine | None = None
        self._starting = asyncio.Lock()
        self._folder: OwnedFolder | None = None

    @property
    def name(self) -> str:
        return self.deployment.config.kind

    @property
    def row_layout(self) -> RowLayout:
        return self.model.layout

    @property
    def weight_version(self) -> int:
        return 0 if self._engine is None else self._engine.weight_version

    async def start(self) -> BalancedEngine:
        """Launch or attach, probe, and return the engine over all servers. Idempotent.

        Raises:
            EngineSetupError: a server cannot be trusted with replay; says what to change.
            EngineUnavailableError: a server did not come up; with the end of its log.
        """
        async with self._starting:
            if self._engine is None:
                self._own_folder()
                try:
                    self._engine = BalancedEngine(await self._connect_all())
                except BaseException:
                    await self._stop_servers()
                    raise
            return self._engine

    async def generate(self, request: GenerateRequest) -> Completion:
        return await (await self.start()).generate(request)

    async def score(self, token_ids: TokenIds) -> Floats:
        return await (await self.start()).score(token_ids)

    async def end_session(self, session_id: str) -> None:
        if self._engine is not None:
            await self._engine.end_session(session_id)

    async def load_weights(self, weights: Weights, version: int) -> None:
        await (await self.start()).load_weights(weights, version)

    def metrics(self) -> dict[str, float]:
        """Return the counters of fleet, engines and servers; empty before the start."""
        if self._engine is None:
            return {}
        restarts = sum(supervisor.num_restarts for supervisor in self.supervisors)
        return self._engine.metrics() | {"fleet_server_restarts": float(restarts)}

    async def aclose(self) -> None:
        """Stop what was launched; logs stay, copies of weights do not. Idempotent."""
        engine, self._engine = self._engine, None
        try:
            if engine is not None:
                await engine.aclose()
        finally:
            await self._stop_servers()
        self._remove_weights(self.deployment.work_dir)
        if self._folder is not None:
            self._folder.close()

    def _own_folder(self) -> None:
        """Take the work folder, and remove the weights in those that killed processes left."""
        work_dir = self.deployment.work_dir
        for folder in ownerless(work_dir.parent, f"{work_dir.name.rpartition('-')[0]}-*"):
            self._remove_weights(folder)
        if self._folder is None:
            self._folder = OwnedFolder(work_dir)

    def _remove_weights(self, work_dir: Path) -> None:
        for folder in (self.deployment.serving_folder, self.deployment.exchange):
            shutil.rmtree(work_dir / folder.name, ignore_errors=True)

    async def _connect_all(self) -> list[HttpEngine]:
        urls = self.deployment.config.urls or await self._launch()
        return list(await asyncio.gather(*(self._connect(n, url) for n, url in enumerate(urls))))

    async def _launch(self) -> list[str]:
        deployment = self.deployment
        folder = await asyncio.to_thread(
            prepare_serving_folder, deployment.policy, deployment.serving_folder
        )
        for port in free_ports(deployment.config.num_servers):
            spec = DIALECTS[self.name].spec(deployment, folder, port)
            self.supervisors.append(Supervisor(spec))
        await asyncio.gather(*(supervisor.start() for supervisor in self.supervisors))
        return [supervisor.process.spec.url for supervisor in self.supervisors]

    async def _connect(self, number: int, url: str) -> HttpEngine:
        transport = HttpTransport(url, self.deployment.transport)
        return await HttpEngine.connect(
            DIALECTS[self.name].connect(transport, self.model),
            self.model,
            self.deployment,
            name=f"{self.name}-{number}",
            reference=self._reference,
        )

    async def _stop_servers(self) -> None:
        await asyncio.gather(*(supervisor.stop() for supervisor in self.supervisors))
        self.supervisors.clear()


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on right now."""
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
