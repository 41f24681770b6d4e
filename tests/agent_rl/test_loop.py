"""The order of one step, and what a step without signal leaves alone."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from loop_fakes import FakeTrainer, group

from agent_rl.config.schema import AlgorithmConfig, RunConfig, TrainConfig
from agent_rl.engines.scripted import ScriptedGenerator
from agent_rl.loop import LoopParts, is_due, train_steps
from agent_rl.metrics.step_times import time_split
from agent_rl.rollout.dynamic_sampling import Collector, collect_groups
from agent_rl.tasks.curriculum import Curriculum
from agent_rl.types import Group, Turn
from envs.base import Task
from routing_cache import RoutingCache

SIGNAL, FLAT = (1.0, 0.0), (1.0, 1.0)


class Recorder:
    """Observer that stops after ``last``."""

    def __init__(self, last: int = 99) -> None:
        self.last, self.rows = last, dict[int, dict[str, float]]()

    def step_done(self, step: int, groups: Sequence[Group], metrics: dict[str, float]) -> bool:
        self.rows[step] = metrics
        return step >= self.last


def _task(name: str) -> Task:
    return Task(name, "issue", {}, "a.py", (), {}, {}, b"")


def _parts(rewards: Sequence[Sequence[float]], steps: int, every: int = 0) -> LoopParts:
    """Step n collects one group with ``rewards[n - 1]``."""

    async def collect(tasks: Sequence[Task], step: int, first_group: int = 0) -> list[Group]:
        assert len(tasks) == 1
        assert first_group == 0
        return [group(tasks[0].task_id, rewards[step - 1])]

    engine = ScriptedGenerator(lambda request, turn: np.array([1], np.int32))
    return LoopParts(
        config=RunConfig(train=TrainConfig(steps=steps, mismatch_every=every)),
        curriculum=Curriculum([_task("a"), _task("b"), _task("c")], 1, seed=0),
        collect=collect,
        engine=engine,
        trainer=FakeTrainer(gap=0.1),
        routing=RoutingCache(engine.row_layout),
    )


def test_weights_reach_the_engine_after_every_step() -> None:
    parts, seen = _parts([SIGNAL, SIGNAL], steps=2), Recorder()
    asyncio.run(train_steps(parts, seen, first_step=1))
    assert parts.engine.weight_version == parts.trainer.weight_version == 2
    assert list(seen.rows) == [1, 2]
    assert seen.rows[1]["loss"] == 0.5


def test_a_step_without_signal_leaves_the_weights_alone() -> None:
    parts, seen = _parts([FLAT, SIGNAL], steps=2), Recorder()
    asyncio.run(train_steps(parts, seen, first_step=1))
    assert isinstance(parts.trainer, FakeTrainer)
    assert len(parts.trainer.steps) == 1
    assert parts.engine.weight_version == 1
    assert "loss" not in seen.rows[1]
    assert seen.rows[1]["groups_with_signal"] == 0.0


def test_rows_of_older_weights_are_retired() -> None:
    parts = _parts([SIGNAL], steps=1)
    session = parts.routing.session(0)
    session.adopt(np.array([1, 2], np.int32))
    rows = np.array([[[0, 1], [2, 3]], [[0, 1], [2, 3]]], np.uint8)
    session.record(np.array([3], np.int32), rows, start=0, weight_version=0, num_prefill=2)
    session.close()
    assert parts.routing.match(np.array([1, 2, 3], np.int32), {0}).num_rows == 2
    asyncio.run(train_steps(parts, Recorder(), first_step=1))
    assert parts.routing.match(np.array([1, 2, 3], np.int32), {0}).num_rows == 0


def test_the_observer_can_stop_and_a_resume_starts_later() -> None:
    parts, seen = _parts([SIGNAL] * 5, steps=5), Recorder(last=3)
    asyncio.run(train_steps(parts, seen, first_step=2))
    assert list(seen.rows) == [2, 3]


def test_mismatch_without_replay_is_measured_when_due() -> None:
    parts, seen = _parts([SIGNAL, SIGNAL], steps=2, every=2), Recorder()
    asyncio.run(train_steps(parts, seen, first_step=1))
    assert "kl_k3_no_replay" not in seen.rows[1]
    expected = np.expm1(0.1) - 0.1  # every token is 0.1 more likely to the trainer
    assert seen.rows[2]["kl_k3_no_replay"] == pytest.approx(expected, rel=1e-5)
    assert seen.rows[2]["abs_logprob_gap_no_replay"] == pytest.approx(0.1, rel=1e-5)
    assert seen.rows[2]["f_2_no_replay"] == 0.0
    assert seen.rows[2]["f_1_1_no_replay"] == 1.0
    assert seen.rows[2]["kl_k3_self"] == 0.0
    assert "kl_k3_replay" not in seen.rows[2]  # these samples have no rows


def test_heldout_tasks_are_measured_when_due_with_the_new_weights() -> None:
    parts, seen = _parts([SIGNAL, SIGNAL], steps=2), Recorder()

    async def evaluate() -> dict[str, float]:
        return {"heldout_resolve_rate": parts.engine.weight_version / 10}

    due = replace(parts.config, train=replace(parts.config.train, eval_every=2))
    asyncio.run(train_steps(replace(parts, config=due, evaluate=evaluate), seen, first_step=1))
    assert "heldout_resolve_rate" not in seen.rows[1]
    assert seen.rows[2]["heldout_resolve_rate"] == 0.2


@pytest.mark.parametrize(("step", "every", "due"), [(4, 2, True), (3, 2, False), (4, 0, False)])
def test_due(step: int, every: int, due: bool) -> None:
    assert is_due(step, every) is due


def test_rollout_time_is_shared_out_as_the_turns_spent_it() -> None:
    one = group("a", SIGNAL)
    one.trajectories[0].branch.turns.append(Turn(3, 5, "stop", "view", "1 a", 4, 3.0, 1.0))
    split = time_split([one], collect_s=8.0, train_s=2.0, wall_s=10.0)
    assert (split["time_generate_s"], split["time_environment_s"]) == (6.0, 2.0)
    assert (split["time_train_s"], split["time_wait_rollout_s"]) == (2.0, 8.0)
    assert split["tokens_per_s"] == pytest.approx(10 / 10)


def _collector(rewards: dict[str, Sequence[float | None]], asked: list[list[str]]) -> Collector:
    """Groups with the rewards of their task's name; ``asked`` sees every call."""

    async def collect(tasks: Sequence[Task], step: int, first_group: int = 0) -> list[Group]:
        asked.append([task.task_id for task in tasks])
        return [group(f"group{first_group + i}", rewards[t.task_id]) for i, t in enumerate(tasks)]

    return collect


def test_groups_without_signal_are_replaced_within_bounds() -> None:
    names = [f"t{i}" for i in range(8)]
    curriculum = Curriculum([_task(name) for name in names], 3, seed=0)
    own = [task.task_id for task in curriculum.at(2)]
    further = [task.task_id for task in curriculum.further(2, 0, 99)]
    assert sorted(own + further) == names
    rewards: dict[str, Sequence[float | None]] = dict.fromkeys(names, FLAT)
    rewards |= {own[0]: SIGNAL, further[1]: SIGNAL, own[1]: (None, 1.0)}
    config = RunConfig(algorithm=AlgorithmConfig(loss="dapo"))
    asked: list[list[str]] = []
    groups = asyncio.run(collect_groups(_collector(rewards, asked), curriculum, config, 2))
    # Two of three lack signal; one of the two that replace them has it; then one more is asked.
    assert asked == [own, further[:2], further[2:3]]
    assert [g.group_id for g in groups] == [f"group{i}" for i in range(6)]
    again: list[list[str]] = []
    asyncio.run(collect_groups(_collector(rewards, again), curriculum, config, 2))
    assert again == asked  # a resumed run asks the same


def test_nothing_is_sampled_again_without_dynamic_sampling_or_need() -> None:
    curriculum = Curriculum([_task(name) for name in "abcd"], 2, seed=0)
    for config, rewards in (
        (RunConfig(), FLAT),
        (RunConfig(algorithm=AlgorithmConfig(loss="dapo")), SIGNAL),
        (RunConfig(algorithm=AlgorithmConfig(loss="dapo", dynamic_sampling_rounds=0)), FLAT),
    ):
        asked: list[list[str]] = []
        collect = _collector(dict.fromkeys("abcd", rewards), asked)
        asyncio.run(collect_groups(collect, curriculum, config, 1))
        assert len(asked) == 1


def test_sampling_again_ends_where_the_tasks_do() -> None:
    curriculum = Curriculum([_task(name) for name in "abc"], 2, seed=0)
    config = RunConfig(algorithm=AlgorithmConfig(dynamic_sampling_rounds=9))
    asked: list[list[str]] = []
    collect = _collector(dict.fromkeys("abc", FLAT), asked)
    assert len(asyncio.run(collect_groups(collect, curriculum, config, 1))) == 3
    assert [len(call) for call in asked] == [2, 1]
