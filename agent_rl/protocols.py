"""The engine and the trainer as the loop needs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from agent_rl.types import Completion, Floats, GenerateRequest, TrainSample
from routing_cache import RowLayout

Weights = Mapping[str, Any]  # Hugging Face parameter name -> CPU tensor


class Generator(Protocol):
    """An inference engine: token ids in, token ids and routing rows out."""

    @property
    def name(self) -> str: ...

    @property
    def row_layout(self) -> RowLayout: ...

    @property
    def weight_version(self) -> int: ...

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion. Raises ``EngineError`` on failure, never a partial answer."""
        ...

    async def end_session(self, session_id: str) -> None:
        """Forget the session's KV prefix. Unknown ids are ignored."""
        ...

    async def load_weights(self, weights: Weights, version: int) -> None:
        """Swap the weights; the prefix cache is flushed with them. No request may be running."""
        ...

    async def aclose(self) -> None: ...


class Scored(Protocol):
    """One sample under the trainer's current weights."""

    @property
    def logprobs(self) -> Floats:
        """``[T]`` under the current weights at the sampling temperature, 0 where not sampled."""
        ...

    @property
    def live_experts(self) -> NDArray[np.integer] | None:
        """``[T-1, L, K]`` that the live routers chose, or would have; None if not asked for."""
        ...


class Trainer(Protocol):
    """A trainer: scores samples under the old policy, takes mini-steps, publishes weights."""

    @property
    def weight_version(self) -> int: ...

    def step(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """One RL step (old log-probs, then the mini-steps). Returns metrics by name.

        Takes the samples' leases only for the call; raises ``ReplayError`` before the optimizer
        moves when rows are missing in strict mode or damaged.
        """
        ...

    def score(
        self,
        samples: Sequence[TrainSample],
        replay: Literal["off", "r3"],
        *,
        live_routing: bool = False,
    ) -> Sequence[Scored]:
        """Score samples under the current weights, with or without their rows; moves nothing.

        ``live_routing`` adds what the live routers choose.
        """
        ...

    def publish_weights(self) -> Weights: ...

    def save(self, folder: Path) -> None:
        """Write model, optimizer, schedule and RNG state below ``folder`` (exists, empty)."""
        ...

    def load(self, folder: Path) -> None: ...

    def close(self) -> None: ...
