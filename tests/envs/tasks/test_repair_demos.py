"""Demonstrations speak as the real environment does."""

import random
from collections.abc import Iterator
from itertools import islice

import pytest

from envs.grading.case_runner import CaseRunner
from envs.sandbox.choose import choose
from envs.sandbox.launch import SandboxSpec
from envs.sandbox.pool import SandboxPool
from envs.swe import SweEnv
from envs.tasks.repair import generate
from envs.tasks.repair_demos import DemoSkill, demonstrate


@pytest.fixture(scope="module")
def runner() -> Iterator[CaseRunner]:
    pool = SandboxPool(choose(SandboxSpec("auto")), num_workers=1)
    yield CaseRunner(pool)
    pool.close()


def test_replies_and_outcome_are_those_of_the_real_environment(runner: CaseRunner) -> None:
    rng = random.Random(0)
    solved = 0
    for task in islice(generate(11, "train"), 60):
        demo = demonstrate(task, rng, DemoSkill())
        env = SweEnv(task.to_task(), runner)
        assert demo.messages[0] == ("user", env.reset().text)
        messages = list(demo.messages[1:])
        submitted = False
        while messages:
            role, action = messages.pop(0)
            assert role == "assistant"
            reply = env.step(action)
            submitted = reply.done
            if messages:
                assert messages.pop(0) == ("obs", reply.text)
        if submitted:
            assert env.grade().reward == float(demo.solved)
        assert submitted or not demo.solved
        solved += demo.solved
        env.close()
    assert 10 < solved < 50


def test_same_seed_same_demonstrations() -> None:
    tasks = list(islice(generate(2, "train"), 20))
    first = [demonstrate(task, random.Random(5), DemoSkill()) for task in tasks]
    assert first == [demonstrate(task, random.Random(5), DemoSkill()) for task in tasks]


def test_a_perfect_demonstrator_always_solves() -> None:
    skill = DemoSkill(right_line=1.0, right_code=1.0, test_first=0.0)
    for task in islice(generate(3, "train"), 50):
        assert demonstrate(task, random.Random(1), skill).solved


def test_turn_limit_is_kept() -> None:
    skill = DemoSkill(right_line=0.0, retry_after_failure=1.0, test_after_edit=1.0, max_turns=4)
    for task in islice(generate(4, "train"), 30):
        demo = demonstrate(task, random.Random(1), skill)
        assert sum(role == "assistant" for role, _ in demo.messages) <= 4
