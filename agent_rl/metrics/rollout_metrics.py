"""Metrics of a step's rollouts: rewards, endings, lengths, failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from agent_rl.rollout.samples import has_signal
from agent_rl.types import Group, Status, Trajectory


def rollout_metrics(groups: Sequence[Group], min_valid_members: int = 2) -> dict[str, float]:
    """Metrics over all trajectories; rates of reward over valid ones only.

    ``groups_with_signal`` is the share of groups with as many valid members, whose rewards differ.
    ``resolve_rate`` counts a reward of 1 as resolved. Failures are counted beside it and are
    never part of a rate.
    """
    everyone = [t for group in groups for t in group.trajectories]
    valid = [t for t in everyone if t.is_valid]
    rewards = [t.reward for t in valid if t.reward is not None]
    statuses = Counter(t.status for t in everyone)
    reasons = Counter(t.stop_reason for t in valid)
    metrics = {
        "num_trajectories": float(len(everyone)),
        "num_valid": float(len(valid)),
        "num_failed": float(statuses[Status.FAILED]),
        "num_aborted": float(statuses[Status.ABORTED]),
        "truncated_fraction": statuses[Status.TRUNCATED] / max(1, len(valid)),
        "reward_mean": _mean(rewards),
        "resolve_rate": resolve_rate(valid),
        "groups_with_signal": _mean([float(has_signal(g, min_valid_members)) for g in groups]),
        "turns_mean": _mean([float(len(t.turns)) for t in valid]),
        "tokens_mean": _mean([float(t.num_tokens) for t in valid]),
        "sampled_tokens": float(sum(t.num_sampled for t in valid)),
    }
    return metrics | {f"ended_{reason}": count / len(valid) for reason, count in reasons.items()}


def resolve_rate(trajectories: Sequence[Trajectory]) -> float:
    """Share of valid trajectories with a reward of 1; 0 when there is none."""
    rewards = [t.reward for t in trajectories if t.reward is not None]
    return _mean([float(reward >= 1.0) for reward in rewards])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
