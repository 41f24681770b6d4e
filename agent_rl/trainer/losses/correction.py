"""Weights that correct a policy loss for rollout and trainer being two different policies.

``ρ = π_old / π_rollout`` on a sampled token: the trainer's policy before the step over the one that
sampled, of the same weights unless rollouts run ahead (``train.overlap_rollout``). A weight is a
constant to the gradient, and multiplies the policy loss alone: KL and entropy terms stay as they
are. Tokens whose weight is 0 still count in the normaliser, as in IcePop's objective and TRL, so
that masking makes a step smaller, never another step; verl's rejection takes them out of it.
Beside a loss whose ratio is a sequence's (GSPO), a token's weight scales what that token adds to
the gradient, as in verl. Weights are not rescaled to a mean of 1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from agent_rl.trainer.losses.loss_inputs import LossInputs, ratio_of

# (inputs, lower bound, upper bound) -> weights [N]
Correction = Callable[[LossInputs, float, float], torch.Tensor]


def truncated(inputs: LossInputs, low: float, high: float) -> torch.Tensor:
    """TIS: ``min(ρ_t, high)``; ``low`` is 0.

    F. Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training",
    where the bound is a parameter; 2 is the default of verl and slime, TRL's is 3.
    """
    return _ratio(inputs).clamp(min=low, max=high)


def masked_tokens(inputs: LossInputs, low: float, high: float) -> torch.Tensor:
    """IcePop: ``ρ_t`` within ``[low, high]``, bounds included, else 0.

    arXiv 2510.18855, 2.3.2; its 2.3.4 trains with 0.5 and 5. SkyRL suggests 0.5 and 2.
    """
    ratio = _ratio(inputs)
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


def masked_sequences(inputs: LossInputs, low: float, high: float) -> torch.Tensor:
    """MIS: ``ρ(y) = Π_t ρ_t`` on all tokens of a sequence within ``[low, high]``, else 0.

    J. Liu et al. 2025, "When speed kills stability: demystifying RL collapse from the
    training-inference mismatch", 4.2.1: ``ρ(y) 1[ρ(y) ≤ C]``, no lower bound; 2 is the C of its
    sequence-level truncation, none is given for masking. The product spreads with length: on
    trajectories of thousands of tokens most are masked.
    """
    sums, _ = inputs.sequence_sums(inputs.old_logprobs - inputs.rollout_logprobs)
    # Compared as logarithms: a long sequence's product may not fit a float.
    log_low = torch.tensor(low, dtype=torch.float64).log().to(sums.device)
    log_high = torch.tensor(high, dtype=torch.float64).log().to(sums.device)
    inside = (sums >= log_low) & (sums <= log_high)
    weights = torch.where(inside, sums.clamp(max=float(log_high)).exp(), 0.0)
    return weights[inputs.sequences].to(inputs.old_logprobs.dtype)


def _ratio(inputs: LossInputs) -> torch.Tensor:
    return ratio_of(inputs.old_logprobs - inputs.rollout_logprobs)


CORRECTIONS: dict[str, Correction] = {
    "tis": truncated,
    "icepop": masked_tokens,
    "mis": masked_sequences,
}
