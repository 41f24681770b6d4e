"""Group-relative advantages against float64 references; groups without signal."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_rl.trainer.advantage import ADVANTAGES, AdvantageFn, centred, normalised


def test_normalised_and_centred() -> None:
    rewards = np.array([1.0, 0.0, 0.0, 0.5])
    difference = rewards - 0.375
    expected = difference / (np.sqrt(np.mean(difference**2)) + 1e-6)
    assert normalised(rewards) == pytest.approx(expected, rel=1e-6)
    assert centred(rewards) == pytest.approx(difference, rel=1e-6)
    assert {"grpo": normalised, "dr_grpo": centred} == ADVANTAGES


@pytest.mark.parametrize("size", [2, 8, 16])
def test_advantages_over_the_sample_std_are_smaller_by_one_factor(size: int) -> None:
    """What peers compute: every advantage of a group times sqrt((G - 1) / G)."""
    rewards = np.zeros(size)
    rewards[0] = 1.0
    sample = (rewards - rewards.mean()) / rewards.std(ddof=1)
    factor = np.sqrt((size - 1) / size)
    assert normalised(rewards) * factor == pytest.approx(sample, rel=1e-5)


@pytest.mark.parametrize("estimate", ADVANTAGES.values())
@pytest.mark.parametrize(
    "rewards",
    [
        np.array([0.3] * 6, dtype=np.float32),  # its float32 std is 3e-8, not 0
        np.array([0.1 + 0.2, 0.3, 0.3]),  # equal up to rounding
        np.array([1.0]),
        np.array([np.nan, 1.0, np.nan]),
        np.array([np.nan, np.nan]),
        np.array([]),
        np.zeros(8),
    ],
)
def test_no_signal_is_exactly_zero(rewards: np.ndarray, estimate: AdvantageFn) -> None:
    advantages = estimate(rewards)
    assert advantages.shape == rewards.shape
    assert not advantages.any()


def test_members_without_a_reward_count_in_nothing() -> None:
    with_failure = normalised(np.array([1.0, 0.0, np.nan, 0.0]))
    without = normalised(np.array([1.0, 0.0, 0.0]))
    assert with_failure[[0, 1, 3]].tolist() == without.tolist()
    assert with_failure[2] == 0.0


@pytest.mark.parametrize("broken", [np.inf, -np.inf])
@pytest.mark.parametrize("estimate", ADVANTAGES.values())
def test_a_reward_that_is_no_number_counts_in_nothing(broken: float, estimate: AdvantageFn) -> None:
    advantages = estimate(np.array([1.0, 0.0, broken, 0.0]))
    assert advantages[2] == 0.0
    assert advantages[[0, 1, 3]].tolist() == estimate(np.array([1.0, 0.0, 0.0])).tolist()


@settings(deadline=None)  # a loaded machine is not a fault
@given(st.lists(st.floats(-10, 10), min_size=2, max_size=16), st.sampled_from(["grpo", "dr_grpo"]))
def test_advantages_are_centred_and_keep_the_order(rewards: list[float], name: str) -> None:
    advantages = ADVANTAGES[name](np.array(rewards))
    assert np.isfinite(advantages).all()
    assert abs(float(advantages.sum())) < 1e-3
    order = np.argsort(rewards, kind="stable")
    assert (np.diff(advantages[order]) >= 0).all()
