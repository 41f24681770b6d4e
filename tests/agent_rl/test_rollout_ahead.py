"""A rollout beside the update: what overlaps, with which weights, and what stopping leaves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from loop_fakes import FakeTrainer, group

from agent_rl.config import RoutingConfig, RunConfig, TrainConfig
from agent_rl.curriculum import Curriculum
from agent_rl.engines.scripted import ScriptedGenerator
from agent_rl.errors import RolloutError
from agent_rl.loop import LoopParts, train_steps
from agent_rl.protocols import Weights
from agent_rl.rollout_ahead import RolloutAhead
from agent_rl.types import Group, TrainSample
from envs.base import Task
from routing_cache import RoutingCache

LIMIT_S = 30.0


@dataclass
class Scene:
    """Collector, engine, trainer and observer that note what they see of one another."""

    overlap: bool = True
    steps: int = 3
    fails_at: int = 0  # the step whose rollout raises
    stops_at: int = 99
    sampled_with: dict[int, int] = field(default_factory=dict[int, int])
    collecting: int = 0
    begun: threading.Event = field(default_factory=threading.Event)
    recorded: list[int] = field(default_factory=list[int])
    metrics: list[dict[str, float]] = field(default_factory=list[dict[str, float]])

    def step_done(self, step: int, groups: Sequence[Group], metrics: dict[str, float]) -> bool:
        assert [g.group_id for g in groups] == [f"step{step}"]
        self.recorded.append(step)
        self.metrics.append(metrics)
        return step >= self.stops_at

    def parts(self) -> LoopParts:
        engine = WatchedEngine(self)
        config = RunConfig(
            train=TrainConfig(steps=self.steps, mismatch_every=0, overlap_rollout=self.overlap),
            routing=RoutingConfig(max_staleness=1),
        )

        async def collect(tasks: Sequence[Task], step: int, first_group: int = 0) -> list[Group]:
            self.sampled_with[step] = engine.weight_version
            self.collecting += 1
            self.begun.set()
            await asyncio.sleep(0.05)
            self.collecting -= 1
            if step == self.fails_at:
                raise RolloutError("the daemon is gone")
            return [group(f"step{step}", (1.0, 0.0))]

        task = Task("a", "issue", {}, "a.py", (), {}, {}, b"")
        return LoopParts(
            config=config,
            curriculum=Curriculum([task], 1, seed=0),
            collect=collect,
            engine=engine,
            trainer=WatchedTrainer(scene=self),
            routing=RoutingCache(engine.row_layout),
        )

    def run(self) -> LoopParts:
        parts = self.parts()
        asyncio.run(train_steps(parts, self, first_step=1))
        return parts


class WatchedEngine(ScriptedGenerator):
    """Whose weights must not change under a rollout."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(lambda request, turn: np.array([1], np.int32))
        self._scene = scene

    async def load_weights(self, weights: Weights, version: int) -> None:
        assert self._scene.collecting == 0
        await super().load_weights(weights, version)


@dataclass
class WatchedTrainer(FakeTrainer):
    """Whose step goes on until the next rollout has begun, where one is to come."""

    scene: Scene = field(default_factory=Scene)

    def step(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        more = self.weight_version + 1 < self.scene.steps
        if self.scene.overlap and more:
            assert self.scene.begun.wait(LIMIT_S), "no rollout began beside the update"
        self.scene.begun.clear()
        return super().step(samples)


def test_the_next_rollout_runs_beside_the_update_with_the_weights_before() -> None:
    scene = Scene()
    parts = scene.run()
    assert scene.sampled_with == {1: 0, 2: 0, 3: 1}
    assert scene.recorded == [1, 2, 3]
    assert parts.engine.weight_version == 3


def test_taking_turns_samples_with_the_newest_weights() -> None:
    scene = Scene(overlap=False)
    scene.run()
    assert scene.sampled_with == {1: 0, 2: 1, 3: 2}


def test_times_tell_what_the_trainer_waited_for() -> None:
    scene = Scene()
    scene.run()
    for metrics in scene.metrics:
        parts = metrics["time_train_s"] + metrics["time_wait_rollout_s"]
        assert parts == pytest.approx(metrics["time_step_s"])
        assert metrics["time_generate_s"] + metrics["time_environment_s"] >= 0.05


def test_a_rollout_that_fails_beside_an_update_loses_no_step() -> None:
    scene = Scene(fails_at=2)
    with pytest.raises(RolloutError, match="the daemon is gone"):
        scene.run()
    assert scene.recorded == [1]


def test_stopping_gives_the_rows_of_an_unused_rollout_back() -> None:
    released: list[int] = []

    @dataclass
    class Rows:
        step: int

        def release(self) -> None:
            released.append(self.step)

    async def collect(step: int) -> list[Group]:
        made = group(f"step{step}", (1.0, 0.0))
        for trajectory in made.trajectories:
            trajectory.routed_experts = Rows(step)  # type: ignore[assignment]
        return [made]

    async def scenario() -> None:
        async with RolloutAhead(collect) as rollouts:
            assert len((await rollouts.take(1)).groups) == 1
            rollouts.begin(2)
            await rollouts.settle()
        assert released == [2, 2]

    asyncio.run(scenario())


def test_leaving_cancels_a_rollout_in_progress() -> None:
    ended: list[str] = []

    async def collect(step: int) -> list[Group]:
        try:
            await asyncio.sleep(LIMIT_S)
        finally:
            ended.append("cancelled")
        return []

    async def scenario() -> None:
        async with RolloutAhead(collect) as rollouts:
            rollouts.begin(1)
            await asyncio.sleep(0)
        assert ended == ["cancelled"]

    asyncio.run(scenario())


def test_a_cancelled_run_waits_for_the_update_that_it_cannot_stop() -> None:
    scene = Scene()
    parts = scene.parts()
    in_update, go_on = threading.Event(), threading.Event()

    class Slow(FakeTrainer):
        def step(self, samples: Sequence[TrainSample]) -> dict[str, float]:
            in_update.set()
            assert go_on.wait(LIMIT_S)
            return super().step(samples)

    async def scenario() -> None:
        trainer = Slow()
        run = asyncio.create_task(
            train_steps(
                LoopParts(
                    parts.config,
                    parts.curriculum,
                    parts.collect,
                    parts.engine,
                    trainer,
                    parts.routing,
                ),
                scene,
                first_step=1,
            )
        )
        await asyncio.to_thread(in_update.wait, LIMIT_S)
        run.cancel()
        await asyncio.sleep(0.05)
        assert not run.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert trainer.weight_version == 1
        assert scene.recorded == []

    asyncio.run(scenario())
