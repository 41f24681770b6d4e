"""From groups of trajectories to train samples: who teaches, and with what advantage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agent_rl.config import RunConfig
from agent_rl.trainer.advantage import ADVANTAGES
from agent_rl.types import Group, TrainSample, Trajectory


def build_samples(groups: Sequence[Group], config: RunConfig) -> list[TrainSample]:
    """Samples of the groups that have signal, rows by reference.

    A group whose valid members all earned the same teaches nothing and is left out, as is one
    with fewer than ``rollout.min_valid_members`` valid members. Failed and aborted members are
    neither learnt from nor part of the baseline.
    """
    samples: list[TrainSample] = []
    for group in groups:
        members = group.valid
        if len(members) < config.rollout.min_valid_members:
            continue
        rewards = np.array([t.reward for t in members], np.float64)
        estimate = ADVANTAGES[config.algorithm.advantage]
        advantages = estimate(rewards, config.algorithm.normalize_std)
        if not np.any(advantages):
            continue
        samples += [
            _sample(t, float(a))
            for t, a in zip(members, advantages, strict=True)
            if t.loss_mask.any()
        ]
    return samples


def _sample(trajectory: Trajectory, advantage: float) -> TrainSample:
    return TrainSample(
        sample_id=f"{trajectory.group_id}/{trajectory.member}",
        token_ids=trajectory.token_ids,
        loss_mask=trajectory.loss_mask,
        rollout_logprobs=trajectory.rollout_logprobs,
        advantages=np.where(trajectory.loss_mask, np.float32(advantage), np.float32(0)),
        weight_versions=trajectory.weight_versions,
        routed_experts=trajectory.routed_experts,
    )
