"""A rollout beside the update: what overlaps, with which weights, and what stopping leaves."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from loop_fakes import FakeTrainer, group

from agent_rl.config.schema import AlgorithmConfig, RoutingConfig, RunConfig, TrainConfig
from agent_rl.engines.scripted import ScriptedGenerator
from agent_rl.errors import RolloutError, TrainerError
from agent_rl.loop import LoopParts, train_steps
from agent_rl.protocols import Weights
from agent_rl.rollout.ahead import RolloutAhead, in_thread
from agent_rl.rollout.dynamic_sampling import collect_groups
from agent_rl.tasks.curriculum import Curriculum
from agent_rl.types import Group, TrainSample
from envs.base import Task
from routing_cache import RoutingCache

LIMIT_S = 30.0
OVERLAPPING = TrainConfig(steps=2, overlap_rollout=True)


def task_of(name: str) -> Task:
    return Task(name, "issue", {}, "a.py", (), {}, {}, b"")


@dataclass
class Scene:
    """Collector, engine, trainer and observer that note what they see of one another."""

    overlap: bool = True
    steps: int = 3
    fails_at: int = 0  # the step whose rollout raises
    stops_at: int = 99
    sampled_with: dict[int, int] = field(default_factory=dict[int, int])
    collecting: int = 0
    begun: defaultdict[int, threading.Event] = field(
        default_factory=lambda: defaultdict(threading.Event)
    )
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
            self.begun[step].set()
            await asyncio.sleep(0.05)
            self.collecting -= 1
            if step == self.fails_at:
                raise RolloutError("the daemon is gone")
            return [group(f"step{step}", (1.0, 0.0))]

        return LoopParts(
            config=config,
            curriculum=Curriculum([task_of("a")], 1, seed=0),
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
        following = self.weight_version + 2
        if self.scene.overlap and following <= self.scene.steps:
            begun = self.scene.begun[following].wait(LIMIT_S)
            assert begun, "no rollout began beside the update"
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


@dataclass
class Rows:
    """A lease that notes in ``released`` when it is given back."""

    name: str
    released: list[str]

    def release(self) -> None:
        self.released.append(self.name)


def leased(name: str, rewards: Sequence[float], released: list[str]) -> Group:
    made = group(name, rewards)
    for trajectory in made.trajectories:
        trajectory.branch.routed_experts = Rows(name, released)  # type: ignore[assignment]
    return made


def test_stopping_gives_the_rows_of_an_unused_rollout_back() -> None:
    released: list[str] = []

    async def collect(step: int) -> list[Group]:
        return [leased(f"step{step}", (1.0, 0.0), released)]

    async def scenario() -> None:
        async with RolloutAhead(collect, OVERLAPPING) as rollouts:
            async with rollouts.take(1) as batch:
                assert len(batch.groups) == 1
                await rollouts.settle()  # until step 2 is there
            assert released == ["step1", "step1"]
        assert released == ["step1", "step1", "step2", "step2"]

    asyncio.run(scenario())


def test_leaving_cancels_a_rollout_in_progress() -> None:
    ended: list[str] = []

    async def collect(step: int) -> list[Group]:
        if step == 1:
            return []
        try:
            await asyncio.sleep(LIMIT_S)
        finally:
            ended.append("cancelled")
        return []

    async def scenario() -> None:
        async with RolloutAhead(collect, OVERLAPPING) as rollouts, rollouts.take(1):
            await asyncio.sleep(0)  # until step 2 has begun
        assert ended == ["cancelled"]

    asyncio.run(scenario())


class Fails:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    async def __call__(self) -> dict[str, float]:
        raise self.error


@pytest.mark.parametrize("error", [RolloutError("the daemon is gone"), asyncio.CancelledError()])
def test_a_step_that_ends_early_gives_its_rows_back_once(error: BaseException) -> None:
    released: list[str] = []
    scene = Scene(overlap=False)
    parts = scene.parts()

    async def collect(tasks: Sequence[Task], step: int, first_group: int = 0) -> list[Group]:
        return [leased(f"step{step}", (1.0, 1.0), released)]

    config = replace(parts.config, train=replace(parts.config.train, eval_every=2))
    failing = replace(parts, config=config, collect=collect, evaluate=Fails(error))
    with pytest.raises(type(error)):
        asyncio.run(train_steps(failing, scene, first_step=1))
    assert released == ["step1"] * 2 + ["step2"] * 2


@pytest.mark.parametrize("error", [RolloutError("the daemon is gone"), asyncio.CancelledError()])
def test_a_round_that_fails_gives_back_the_rows_of_those_before(error: BaseException) -> None:
    released: list[str] = []
    curriculum = Curriculum([task_of(name) for name in "ab"], 1, seed=0)
    config = RunConfig(algorithm=AlgorithmConfig(loss="dapo"))

    async def collect(tasks: Sequence[Task], step: int, first_group: int = 0) -> list[Group]:
        if first_group:
            raise error
        return [leased("first", (1.0, 1.0), released)]

    with pytest.raises(type(error)):
        asyncio.run(collect_groups(collect, curriculum, config, 1))
    assert released == ["first", "first"]


class Slow(FakeTrainer):
    """Whose step goes on until it is told to end, or fail."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error
        self.in_step, self.go_on = threading.Event(), threading.Event()

    def step(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        self.in_step.set()
        assert self.go_on.wait(LIMIT_S)
        if self.error is not None:
            raise self.error
        return super().step(samples)


async def cancel_in_update(run: asyncio.Task[None], trainer: Slow, times: int) -> None:
    await asyncio.to_thread(trainer.in_step.wait, LIMIT_S)
    for _ in range(times):
        run.cancel()
        await asyncio.sleep(0.05)
        assert not run.done()
    trainer.go_on.set()


@pytest.mark.parametrize("times", [1, 2])
def test_a_cancelled_run_waits_for_the_update_that_it_cannot_stop_and_keeps_it(times: int) -> None:
    scene, trainer = Scene(), Slow()

    async def scenario() -> None:
        parts = replace(scene.parts(), trainer=trainer)
        run = asyncio.create_task(train_steps(parts, scene, first_step=1))
        await cancel_in_update(run, trainer, times)
        with pytest.raises(asyncio.CancelledError):
            await run

    asyncio.run(scenario())
    assert trainer.weight_version == 1
    assert scene.recorded == [1]
    assert scene.metrics[0]["loss"] == 0.5
    assert scene.metrics[0]["time_step_s"] > 0


def test_an_update_that_fails_in_a_cancelled_run_says_so() -> None:
    scene, trainer = Scene(), Slow(TrainerError("no finite gradient"))

    async def scenario() -> None:
        parts = replace(scene.parts(), trainer=trainer)
        run = asyncio.create_task(train_steps(parts, scene, first_step=1))
        await cancel_in_update(run, trainer, 1)
        with pytest.raises(TrainerError, match="no finite gradient"):
            await run

    asyncio.run(scenario())
    assert scene.recorded == []


def test_an_event_loop_that_is_closed_does_not_leave_the_update_behind() -> None:
    """As after a second Ctrl-C: whoever saves on the way out must not meet moving weights."""
    seen: list[bool] = []
    trainer = Slow()

    async def work() -> None:
        try:
            await in_thread(lambda: trainer.step([]))
            await asyncio.sleep(LIMIT_S)
        except asyncio.CancelledError:
            seen.append(trainer.weight_version == 1)
            raise

    async def main() -> None:
        running = asyncio.create_task(work())
        await asyncio.to_thread(trainer.in_step.wait, LIMIT_S)
        running.cancel()
        await asyncio.sleep(0)
        threading.Timer(0.2, trainer.go_on.set).start()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert seen == [True]


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_run_that_is_cancelled_behind_the_update_keeps_the_step(evaluates: bool) -> None:
    """While the weights go to the engine, or in an evaluation: both can take long."""
    scene = Scene(overlap=False)
    parts = scene.parts()
    waiting = asyncio.Event()

    class Engine(WatchedEngine):
        async def load_weights(self, weights: Weights, version: int) -> None:
            await (super().load_weights(weights, version) if evaluates else evaluate())

    async def evaluate() -> dict[str, float]:
        waiting.set()
        await asyncio.sleep(LIMIT_S)
        return {}

    async def scenario() -> None:
        config = replace(parts.config, train=replace(parts.config.train, eval_every=1))
        stuck = replace(parts, config=config, engine=Engine(scene), evaluate=evaluate)
        run = asyncio.create_task(train_steps(stuck, scene, first_step=1))
        await waiting.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    asyncio.run(scenario())
    assert scene.recorded == [1]
    assert scene.metrics[0]["time_step_s"] > 0
