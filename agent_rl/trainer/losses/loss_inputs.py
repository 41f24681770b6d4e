"""Inputs and outputs of a policy loss.

A loss is one value per token. Weighting and normalisation belong to the layout and to Megatron
(``batch.MicroBatch.weights`` and ``units``), so that a loss never knows how tokens are packed.

Axis letters: N sampled tokens of a micro-batch on this rank, Q its sequences (on all ranks).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from agent_rl.config.objective import Objective

# Beyond e^20 a ratio says only that the policies have nothing in common: it is held there, without
# a gradient, so that no token's overflow turns the clipped or masked gradients beside it to NaN.
MAX_LOG_RATIO = 20.0


def ratio_of(log_ratio: torch.Tensor) -> torch.Tensor:
    """``exp(log_ratio)``, at most ``exp(MAX_LOG_RATIO)``."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def this_rank_only(values: torch.Tensor) -> torch.Tensor:
    """The sum over context-parallel ranks where there is one rank."""
    return values


@dataclass(frozen=True)
class LossInputs:
    """Values that a loss may use; ``[N]`` float32 unless said otherwise."""

    logprobs: torch.Tensor  # current policy, carries the gradient
    old_logprobs: torch.Tensor  # the policy before this step's first update
    rollout_logprobs: torch.Tensor  # the inference engine's
    advantages: torch.Tensor
    sequences: torch.Tensor  # [N] int64 from 0 to Q - 1: which trajectory a token belongs to
    num_sequences: int  # Q, the same on every context-parallel rank
    # Adds [..., Q] values over the ranks that hold parts of the same sequences; no gradient.
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor] = this_rank_only
    ref_logprobs: torch.Tensor | None = None  # the frozen reference, when a KL term is asked for
    entropy: torch.Tensor | None = None  # current policy, carries a gradient; likewise

    def sequence_means(self, values: torch.Tensor) -> torch.Tensor:
        """Mean of ``values [N]`` over each sequence's sampled tokens, ``[Q]``; 0 where none."""
        sums, counts = self.sequence_sums(values)
        return sums / counts.clamp(min=1)

    def sequence_sums(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums of ``values [N]`` and numbers of tokens by sequence over all ranks, ``[Q]`` each.

        Not differentiable. Every context-parallel rank must call it, once for each of its calls
        on the others.
        """
        detached = values.detach().double()
        parts = torch.stack([detached, torch.ones_like(detached)])
        local = parts.new_zeros(2, self.num_sequences).index_add_(1, self.sequences, parts)
        sums, counts = self.sum_over_ranks(local)
        return sums, counts


@dataclass(frozen=True)
class LossOutput:
    """``per_token`` is ``[N]``; ``clipped`` marks tokens whose gradient the clip removed.

    ``details`` are further ``[N]`` values, detached, whose means are worth a metric.
    """

    per_token: torch.Tensor
    ratio: torch.Tensor  # [N], detached: what the loss compared with its bounds
    clipped: torch.Tensor  # [N] bool
    details: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])


@dataclass(frozen=True)
class Loss:
    """``needs_old`` asks for the old policy's log-probs, which cost a forward pass."""

    function: Callable[[LossInputs, Objective], LossOutput]
    needs_old: bool
