"""Types of the factories that the trainer's fixtures hand to tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from agent_rl.trainer.megatron import MegatronTrainer
from agent_rl.types import TrainSample


class MakePolicy(Protocol):
    """Write a policy whose config differs by ``overrides``; return its folder."""

    def __call__(self, **overrides: Any) -> Path: ...


class MakeSamples(Protocol):
    """Make one sample per length for the policy in ``folder``; None is the plain policy.

    ``sample`` goes to ``make_sample``.
    """

    def __call__(
        self,
        lengths: Sequence[int],
        *,
        seed: int = 0,
        folder: Path | None = None,
        **sample: Any,
    ) -> list[TrainSample]: ...


class MakeTrainer(Protocol):
    """Start a trainer of the policy in ``folder``; None is the plain policy.

    ``sections`` goes to ``run_config``.
    """

    def __call__(
        self, folder: Path | None = None, **sections: dict[str, Any]
    ) -> MegatronTrainer: ...
