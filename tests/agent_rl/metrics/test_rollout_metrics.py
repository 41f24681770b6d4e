"""What a step's rollouts are reported as: failures beside every rate, never in one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from agent_rl.metrics.rollout_metrics import resolve_rate, rollout_metrics
from agent_rl.types import Branch, Group, Status, Trajectory


def played(reward: float | None, status: Status, stop_reason: str, sampled: int = 2) -> Trajectory:
    """Three prompt tokens, then the sampled ones."""
    at = np.arange(3 + sampled)
    return Trajectory(
        task_id="t",
        group_id="g",
        member=0,
        status=status,
        stop_reason=stop_reason,
        reward=reward,
        branches=[
            Branch(
                token_ids=at.astype(np.int32),
                loss_mask=at >= 3,
                rollout_logprobs=np.zeros(len(at), np.float32),
                turns=[],
                weight_versions=(0,),
            )
        ],
    )


SOLVED = played(1.0, Status.COMPLETED, "submit")
HALF = played(0.5, Status.COMPLETED, "submit", sampled=4)
CUT = played(0.0, Status.TRUNCATED, "max_turns")
FAILED = played(None, Status.FAILED, "infrastructure", sampled=9)
ABORTED = played(None, Status.ABORTED, "cancelled")


def group(*members: Trajectory) -> Group:
    return Group(
        "g", "t", [dataclasses.replace(member, member=i) for i, member in enumerate(members)]
    )


def test_rates_are_over_valid_members_and_failures_are_counted() -> None:
    metrics = rollout_metrics([group(SOLVED, HALF, FAILED), group(CUT, ABORTED, CUT)])
    assert (metrics["num_trajectories"], metrics["num_valid"]) == (6.0, 4.0)
    assert (metrics["num_failed"], metrics["num_aborted"]) == (1.0, 1.0)
    assert metrics["reward_mean"] == pytest.approx(1.5 / 4)
    assert metrics["resolve_rate"] == pytest.approx(1 / 4)  # half a reward resolves nothing
    assert metrics["truncated_fraction"] == pytest.approx(2 / 4)
    assert (metrics["ended_submit"], metrics["ended_max_turns"]) == (0.5, 0.5)
    assert "ended_infrastructure" not in metrics
    assert metrics["tokens_mean"] == pytest.approx((5 + 7 + 5 + 5) / 4)
    assert metrics["sampled_tokens"] == 10.0
    assert metrics["groups_with_signal"] == 0.5


def test_nothing_valid_is_zero_and_finite() -> None:
    metrics = rollout_metrics([group(FAILED, ABORTED)])
    assert np.isfinite(list(metrics.values())).all()
    assert metrics["resolve_rate"] == metrics["reward_mean"] == metrics["truncated_fraction"] == 0.0
    assert np.isfinite(list(rollout_metrics([]).values())).all()
    assert resolve_rate([FAILED]) == 0.0
