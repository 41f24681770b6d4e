"""Who teaches: groups with signal, valid members only, advantages on sampled tokens only."""

import numpy as np
import pytest

from agent_rl.config.schema import AgentConfig, AlgorithmConfig, RolloutConfig, RunConfig
from agent_rl.metrics.rollout_metrics import rollout_metrics
from agent_rl.rollout.samples import build_samples, has_signal, overlong_penalty
from agent_rl.types import Branch, Group, Status, Trajectory


def _trajectory(member: int, reward: float | None, sampled: int = 2) -> Trajectory:
    mask = np.array([False] * 3 + [True] * sampled)
    return Trajectory(
        task_id="t",
        group_id="g",
        member=member,
        status=Status.FAILED if reward is None else Status.COMPLETED,
        stop_reason="infrastructure" if reward is None else "submit",
        reward=reward,
        branches=[
            Branch(
                token_ids=np.arange(3 + sampled, dtype=np.int32),
                loss_mask=mask,
                rollout_logprobs=np.zeros(3 + sampled, np.float32),
                turns=[],
                weight_versions=(0,),
            )
        ],
    )


def _group(*rewards: float | None) -> Group:
    return Group("g", "t", [_trajectory(i, reward) for i, reward in enumerate(rewards)])


CONFIG = RunConfig(algorithm=AlgorithmConfig(advantage="dr_grpo"))


def test_a_failed_member_is_neither_learnt_from_nor_in_the_baseline() -> None:
    samples = build_samples([_group(1.0, 0.0, None, 0.0)], CONFIG)
    assert [s.sample_id for s in samples] == ["g/0", "g/1", "g/3"]
    assert [float(s.advantages[-1]) for s in samples] == pytest.approx([2 / 3, -1 / 3, -1 / 3])


def test_a_group_of_failures_teaches_nothing() -> None:
    assert build_samples([_group(None, None, None, None)], CONFIG) == []


def test_too_few_valid_members_teach_nothing() -> None:
    """Two survivors have a spread, but a baseline of two may be less than what was asked for."""
    assert build_samples([_group(1.0, None, None)], CONFIG) == []
    group = _group(1.0, 0.0, None, None)
    assert len(build_samples([group], CONFIG)) == 2
    strict = RunConfig(rollout=RolloutConfig(min_valid_members=3))
    assert build_samples([group], strict) == []
    assert [rollout_metrics([group], n)["groups_with_signal"] for n in (2, 3)] == [1.0, 0.0]


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo"])
def test_equal_rewards_teach_nothing_even_with_rounding_noise(advantage: str) -> None:
    config = RunConfig(algorithm=AlgorithmConfig(advantage=advantage))  # type: ignore[arg-type]
    rewards = [float(np.float32(0.3))] * 6
    assert build_samples([_group(*rewards)], config) == []


def test_advantages_only_on_sampled_tokens() -> None:
    for sample in build_samples([_group(1.0, 0.0)], CONFIG):
        assert np.all((sample.advantages != 0) == sample.loss_mask)


def test_a_trajectory_without_sampled_tokens_is_left_out() -> None:
    group = Group("g", "t", [_trajectory(0, 1.0), _trajectory(1, 0.0, sampled=0)])
    assert [s.sample_id for s in build_samples([group], CONFIG)] == ["g/0"]


@pytest.mark.parametrize(
    ("num_tokens", "penalty"), [(10, 0.0), (80, 0.0), (90, 0.5), (100, 1.0), (120, 1.0)]
)
def test_length_costs_from_where_the_cached_part_begins(num_tokens: int, penalty: float) -> None:
    """The published piecewise line for a limit of 100 with 20 of it cached."""
    assert overlong_penalty(num_tokens, 100, 20.0) == pytest.approx(penalty)
    assert overlong_penalty(num_tokens, 100, 0.0) == 0.0


def test_long_members_learn_from_less_but_a_group_without_signal_stays_without() -> None:
    agent = AgentConfig(max_tokens=10, max_new_tokens=4)
    config = RunConfig(
        agent=agent, algorithm=AlgorithmConfig(overlong_fraction=0.5, advantage="dr_grpo")
    )
    short, long, wrong = _trajectory(0, 1.0), _trajectory(1, 1.0, sampled=7), _trajectory(2, 0.0)
    samples = build_samples([Group("g", "t", [short, long, wrong])], config)
    rewards = np.array([1.0, 0.0, 0.0])  # the long one paid all of it
    expected = (rewards - rewards.mean()).tolist()
    assert [float(s.advantages[-1]) for s in samples] == pytest.approx(expected)
    both_right = Group("g", "t", [short, long])
    assert not has_signal(both_right, 2)
    assert build_samples([both_right], config) == []
    dapo = RunConfig(agent=agent, algorithm=AlgorithmConfig(loss="dapo"))
    assert len({float(s.advantages[-1]) for s in build_samples([_long_group()], dapo)}) == 3


def _long_group() -> Group:
    return Group(
        "g", "t", [_trajectory(0, 1.0), _trajectory(1, 1.0, sampled=6), _trajectory(2, 0.0)]
    )
