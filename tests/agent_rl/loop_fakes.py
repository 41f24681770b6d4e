"""Small stand-ins that implement the protocols, for tests of what calls them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from agent_rl.protocols import Weights
from agent_rl.types import Floats, Group, Status, TrainSample, Trajectory


def trajectory(
    reward: float | None, *, group: str = "g", member: int = 0, sampled: int = 2, version: int = 0
) -> Trajectory:
    """Three prompt tokens, then ``sampled`` sampled ones."""
    size = 3 + sampled
    return Trajectory(
        task_id=f"task-{group}",
        group_id=group,
        member=member,
        status=Status.FAILED if reward is None else Status.COMPLETED,
        stop_reason="infrastructure" if reward is None else "submit",
        token_ids=np.arange(size, dtype=np.int32),
        loss_mask=np.arange(size) >= 3,
        rollout_logprobs=np.where(np.arange(size) >= 3, -1.0, 0.0).astype(np.float32),
        turns=[],
        reward=reward,
        weight_versions=(version,),
    )


def group(name: str, rewards: Sequence[float | None]) -> Group:
    members = [trajectory(r, group=name, member=i) for i, r in enumerate(rewards)]
    return Group(name, f"task-{name}", members)


@dataclass(frozen=True)
class FakeScore:
    logprobs: Floats
    live_experts: None = None


@dataclass
class FakeTrainer:
    """Counts its steps; every score is ``-1`` a token, plus ``gap`` without replay."""

    gap: float = 0.0
    weight_version: int = 0
    steps: list[list[str]] = field(default_factory=list)

    def step(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        self.steps.append([sample.sample_id for sample in samples])
        self.weight_version += 1
        return {"loss": 0.5}

    def score(
        self, samples: Sequence[TrainSample], replay: str, *, live_routing: bool = False
    ) -> list[FakeScore]:
        gap = self.gap if replay == "off" else 0.0
        return [
            FakeScore(np.where(s.loss_mask, -1.0 + gap, 0.0).astype(np.float32)) for s in samples
        ]

    def publish_weights(self) -> Weights:
        return {"version": self.weight_version}

    def save(self, folder: Path) -> None:
        (folder / "weights").write_text(str(self.weight_version))

    def load(self, folder: Path) -> None:
        self.weight_version = int((folder / "weights").read_text())

    def close(self) -> None:
        return None
