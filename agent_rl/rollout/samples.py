"""Train samples made of groups of trajectories: who teaches, and with what advantage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agent_rl.config.objective import objective
from agent_rl.config.schema import RunConfig
from agent_rl.trainer.advantage import ADVANTAGES, centred
from agent_rl.types import Group, TrainSample, Trajectory


def build_samples(groups: Sequence[Group], config: RunConfig) -> list[TrainSample]:
    """Make samples of the groups that have signal, rows by reference.

    Failed and aborted members are neither learnt from nor part of the baseline. Where length
    costs (``algorithm.overlong_fraction``), the cost is taken off the reward that advantages are
    made of, never off the reward that is reported or that decides whether a group has signal.
    """
    settings = objective(config.algorithm)
    estimate = ADVANTAGES[settings.advantage]
    cached = settings.overlong_fraction * config.agent.max_tokens
    samples: list[TrainSample] = []
    for group in groups:
        if not has_signal(group, config.rollout.min_valid_members):
            continue
        members = group.valid
        shaped = [
            _reward(t) - overlong_penalty(_longest(t), config.agent.max_tokens, cached)
            for t in members
        ]
        advantages = estimate(np.array(shaped, np.float64))
        if not np.any(advantages):
            continue  # length made up for the reward
        for trajectory, advantage in zip(members, advantages, strict=True):
            samples += branch_samples(trajectory, float(advantage))
    return samples


def branch_samples(trajectory: Trajectory, advantage: float) -> list[TrainSample]:
    """Make one sample of each branch of an episode in which something was sampled."""
    name = f"{trajectory.group_id}/{trajectory.member}"
    branches = [branch for branch in trajectory.branches if branch.loss_mask.any()]
    return [
        TrainSample(
            sample_id=name if number == 0 else f"{name}/{number}",
            token_ids=branch.token_ids,
            loss_mask=branch.loss_mask,
            rollout_logprobs=branch.rollout_logprobs,
            advantages=np.where(branch.loss_mask, np.float32(advantage), np.float32(0)),
            weight_versions=branch.weight_versions,
            routed_experts=branch.routed_experts,
        )
        for number, branch in enumerate(branches)
    ]


def has_signal(group: Group, min_valid_members: int) -> bool:
    """Tell whether a group teaches: enough valid members, rewards that differ beyond rounding."""
    rewards = np.array([_reward(t) for t in group.valid], np.float64)
    return len(rewards) >= min_valid_members and bool(centred(rewards).any())


def overlong_penalty(num_tokens: int, max_tokens: int, cached: float) -> float:
    """Return DAPO's soft length penalty (arXiv 2503.14476, eq. 13), from 0 to 1.

    0 up to ``max_tokens - cached`` tokens, then rising evenly to 1 at ``max_tokens``. The length
    is the whole trajectory's, prompt and observations included: that is what is cut off. The
    paper's is the response's alone, and its rewards are -1 and 1 (eq. 7): beside rewards of 0 and 1
    the same cost weighs twice as much.
    """
    if cached <= 0:
        return 0.0
    return float(np.clip((num_tokens - (max_tokens - cached)) / cached, 0.0, 1.0))


def _reward(trajectory: Trajectory) -> float:
    assert trajectory.reward is not None
    return trajectory.reward


def _longest(trajectory: Trajectory) -> int:
    return max((len(branch.token_ids) for branch in trajectory.branches), default=0)
