"""Policy losses on the sampled tokens of a micro-batch; another loss is one more dict entry.

A loss is a per-token value; weighting and normalisation belong to the layout and to Megatron
(``batch.MicroBatch.weights`` and ``units``), so that a loss never knows how tokens are packed.

Axis letter: N sampled tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from agent_rl.config import AlgorithmConfig


@dataclass(frozen=True)
class LossInputs:
    """What a loss may use; all ``[N]`` float32."""

    logprobs: torch.Tensor  # current policy, carries the gradient
    old_logprobs: torch.Tensor  # the policy before this step's first update
    advantages: torch.Tensor


@dataclass(frozen=True)
class LossOutput:
    """``per_token`` is ``[N]``; ``clipped`` marks tokens whose gradient the clip removed."""

    per_token: torch.Tensor
    ratio: torch.Tensor  # [N], detached
    clipped: torch.Tensor  # [N] bool


@dataclass(frozen=True)
class Loss:
    """``needs_old`` asks for the old policy's log-probs, which cost a forward pass."""

    function: Callable[[LossInputs, AlgorithmConfig], LossOutput]
    needs_old: bool


def clipped_surrogate(inputs: LossInputs, config: AlgorithmConfig) -> LossOutput:
    """``-min(w A, clip(w, 1 - clip_low, 1 + clip_high) A)`` with ``w = exp(logp - old logp)``.

    PPO's surrogate (arXiv 1707.06347, eq. 7) with the two bounds apart (arXiv 2503.14476, eq. 10).
    """
    ratio = (inputs.logprobs - inputs.old_logprobs).exp()
    bounded = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    free, held = ratio * inputs.advantages, bounded * inputs.advantages
    detached = ratio.detach()
    return LossOutput(-torch.minimum(free, held), detached, held.detach() < free.detach())


def weighted_likelihood(inputs: LossInputs, config: AlgorithmConfig) -> LossOutput:
    """``-A logp``: supervised warm start, the advantage being the token's weight."""
    ones = torch.ones_like(inputs.advantages)
    return LossOutput(-inputs.advantages * inputs.logprobs, ones, ones.bool().logical_not())


LOSSES: dict[str, Loss] = {
    "grpo": Loss(clipped_surrogate, needs_old=True),
    "sft": Loss(weighted_likelihood, needs_old=False),
}
