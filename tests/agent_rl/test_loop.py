"""The order of one step, and what a step without signal leaves alone."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from loop_fakes import FakeTrainer, group

from agent_rl.config import RunConfig, TrainConfig
from agent_rl.curriculum import Curriculum
from agent_rl.engines.scripted import ScriptedGenerator
from agent_rl.loop import LoopParts, is_due, time_split, train_steps
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

    async def collect(tasks: Sequence[Task], step: int) -> list[Group]:
        assert len(tasks) == 1
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


@pytest.mark.parametrize(("step", "every", "due"), [(4, 2, True), (3, 2, False), (4, 0, False)])
def test_due(step: int, every: int, due: bool) -> None:
    assert is_due(step, every) is due


def test_rollout_time_is_shared_out_as_the_turns_spent_it() -> None:
    one = group("a", SIGNAL)
    one.trajectories[0].turns.append(Turn(3, 5, "stop", "view", "1 a", 4, 3.0, 1.0))
    split = time_split([one], collect_s=8.0, train_s=2.0)
    assert (split["time_generate_s"], split["time_environment_s"]) == (6.0, 2.0)
    assert split["tokens_per_s"] == pytest.approx(10 / 10)
