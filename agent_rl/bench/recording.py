"""A generator that remembers the whole distribution behind every sampled token."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np

from agent_rl.errors import EngineError
from agent_rl.protocols import Generator, Weights
from agent_rl.types import Completion, Floats, GenerateRequest
from routing_cache import RowLayout


class RecordingGenerator:
    """Passes everything on to ``inner`` and keeps ``full_logprobs`` by session."""

    def __init__(self, inner: Generator) -> None:
        self._inner = inner
        self._kept: defaultdict[str, list[Floats]] = defaultdict(list)

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def row_layout(self) -> RowLayout:
        return self._inner.row_layout

    @property
    def weight_version(self) -> int:
        return self._inner.weight_version

    async def generate(self, request: GenerateRequest) -> Completion:
        completion = await self._inner.generate(replace(request, return_full_logprobs=True))
        if completion.full_logprobs is None:
            raise EngineError(
                f"engine {self.name!r} cannot return whole distributions: got=none "
                "expected=full_logprobs; measure with the local engine"
            )
        self._kept[request.session_id].append(completion.full_logprobs)
        return completion

    def full_logprobs(self, prefix: str) -> Floats:
        """``[N, V]`` of the session ``prefix/attempt`` with the last attempt, in token order."""
        sessions = sorted(name for name in self._kept if name.rsplit("/", 1)[0] == prefix)
        if not sessions:
            raise KeyError(prefix)
        return np.concatenate(self._kept[sessions[-1]])

    def clear(self) -> None:
        """Forget everything kept so far."""
        self._kept.clear()

    async def end_session(self, session_id: str) -> None:
        await self._inner.end_session(session_id)

    async def load_weights(self, weights: Weights, version: int) -> None:
        await self._inner.load_weights(weights, version)

    async def aclose(self) -> None:
        await self._inner.aclose()
