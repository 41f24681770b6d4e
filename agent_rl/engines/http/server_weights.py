"""Putting weights onto a server, proving that they are there, and keeping them for a restart."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from agent_rl.engines.http.deployment import Deployment
from agent_rl.engines.http.inference_server import InferenceServer
from agent_rl.engines.http.server_probe import scored_prompts, verify_update
from agent_rl.engines.http.serving_folder import serving_weights, write_serving_folder
from agent_rl.model.config_json import ServedModel
from agent_rl.protocols import Weights
from agent_rl.types import Floats, TokenIds


class WeightReference(Protocol):
    """Knows what weights must give: ``TransformersReference`` for small models."""

    def score(self, weights: Weights, token_ids: TokenIds) -> Floats:
        """Return the log-probs ``[T-1]`` of tokens 1..T-1 at temperature 1."""
        ...


class ServerWeights:
    """The weights of one server: the newest ones are kept, as tensors or as a folder.

    Args:
        name: of the engine, for folders.
        reference: None checks version and flush only.
    """

    def __init__(
        self,
        server: InferenceServer,
        model: ServedModel,
        deployment: Deployment,
        *,
        name: str,
        reference: WeightReference | None,
    ) -> None:
        self._server = server
        self._model = model
        self._deployment = deployment
        self._name = name
        self._reference = reference
        self._held: Weights | Path | None = None
        # Log-probs of the scored prompts under the held weights.
        self._expected: Sequence[Floats] | None = None

    async def replace(self, weights: Weights, version: int) -> None:
        """Load and verify ``weights``; the server must be paused. Keeps a reference to them.

        Raises ``EngineError``: refused, or not what arrived; the server's weights are unknown then.
        """
        held: Weights | Path = serving_weights(weights, self._model.names)
        if self._deployment.config.weight_transfer == "disk":
            held = await asyncio.to_thread(self._write_folder, held, version)
        expected = None
        if self._reference is not None:
            prompts = scored_prompts(self._model.vocab_size)
            expected = await asyncio.to_thread(_score_all, self._reference, weights, prompts)
        try:
            await self._apply(held, version, expected)
        except BaseException:
            if isinstance(held, Path):
                shutil.rmtree(held, ignore_errors=True)
            raise
        self.forget()
        self._held, self._expected = held, expected

    async def restore(self, version: int) -> None:
        """Load the kept weights again, into a server that restarted. Without any it has its own."""
        if self._held is not None:
            await self._apply(self._held, version, self._expected)

    def forget(self) -> None:
        """Drop the kept weights, and their folder."""
        if isinstance(self._held, Path):
            shutil.rmtree(self._held, ignore_errors=True)
        self._held = None

    async def _apply(
        self, held: Weights | Path, version: int, expected: Sequence[Floats] | None
    ) -> None:
        if isinstance(held, Path):
            await self._server.load_folder(held, version)
        else:
            await self._server.push_tensors(held, version)
        await self._server.resume()
        await verify_update(
            self._server,
            version,
            vocab_size=self._model.vocab_size,
            expected=expected,
            tolerance=self._deployment.verify_tolerance,
        )

    def _write_folder(self, tensors: Weights, version: int) -> Path:
        folder = self._deployment.exchange / f"{self._name}-v{version}"
        return write_serving_folder(tensors, folder, template=self._deployment.policy)


def _score_all(
    reference: WeightReference, weights: Weights, prompts: Sequence[TokenIds]
) -> list[Floats]:
    return [reference.score(weights, prompt) for prompt in prompts]
