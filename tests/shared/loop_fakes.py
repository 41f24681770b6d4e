"""Small stand-ins that implement the protocols, for tests of what calls them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np

from agent_rl.config.schema import RunConfig
from agent_rl.engines.scripted import ScriptedGenerator
from agent_rl.loop import LoopParts
from agent_rl.protocols import Weights
from agent_rl.rollout.chat import CompactRenderer
from agent_rl.rollout.compact_tokenizer import build_compact_tokenizer
from agent_rl.run.parts import Assembly, Environments, Rollout
from agent_rl.tasks.curriculum import Curriculum
from agent_rl.types import Branch, Floats, Group, Status, TrainSample, Trajectory
from envs.base import Env, Task
from routing_cache import RoutingCache


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
        reward=reward,
        branches=[
            Branch(
                token_ids=np.arange(size, dtype=np.int32),
                loss_mask=np.arange(size) >= 3,
                rollout_logprobs=np.where(np.arange(size) >= 3, -1.0, 0.0).astype(np.float32),
                turns=[],
                weight_versions=(version,),
            )
        ],
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


class Notes:
    """A display that keeps what it was told."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...

    def activity(self, what: str, done: int, total: int) -> None: ...

    def step_done(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None: ...

    def note(self, text: str) -> None:
        self.texts.append(text)


async def _nothing(tasks: Sequence[Task], step: int) -> list[Group]:
    raise AssertionError("nothing is collected here")


def _no_env(task: Task) -> Env:
    raise AssertionError("nothing is played here")


def assembly(config: RunConfig) -> Assembly:
    """A fresh process: trainer and engine at version 0."""
    engine = ScriptedGenerator(lambda request, turn: np.array([1], np.int32))
    routing = RoutingCache(engine.row_layout)
    renderer = CompactRenderer(build_compact_tokenizer(["a b c ."]), 16)
    environments = Environments(_no_env, lambda: None, lambda: None, "none")
    rollout = Rollout(config, engine, routing, renderer, environments, ThreadPoolExecutor(1))
    curriculum = Curriculum([Task("a", "issue", {}, "a.py", (), {}, {}, b"")], 1, seed=0)
    loop = LoopParts(config, curriculum, _nothing, engine, FakeTrainer(), routing)
    return Assembly(rollout, loop, [])
