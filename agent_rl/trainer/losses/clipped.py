"""PPO's clipped surrogate on single tokens: GRPO, Dr. GRPO and DAPO."""

from __future__ import annotations

import torch

from agent_rl.config.objective import Objective
from agent_rl.trainer.losses.loss_inputs import LossInputs, LossOutput, ratio_of


def clipped_surrogate(inputs: LossInputs, objective: Objective) -> LossOutput:
    """``-min(w A, clip(w, 1 - clip_low, 1 + clip_high) A)`` with ``w = exp(logp - old logp)``.

    PPO's surrogate (arXiv 1707.06347, eq. 7) with the two bounds apart (arXiv 2503.14476, eq. 8).
    GRPO (arXiv 2402.03300, eq. 3), Dr. GRPO (arXiv 2503.20783, 3.2) and DAPO share it: they differ
    in advantage and normaliser, which ``agent_rl.config.objective`` names. GRPO's paper gives no
    value for the bound; Dr. GRPO's is 0.2 on both sides, DAPO's 0.2 and 0.28 (its 4.1).

    No dual clip (arXiv 1912.09729): a token of negative advantage whose ratio grew is unbounded
    here as in those papers, slime and TRL, where verl by default holds its loss at 3 |A|.
    """
    ratio = ratio_of(inputs.logprobs - inputs.old_logprobs)
    return bounded_surrogate(ratio, inputs.advantages, objective)


def bounded_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, objective: Objective
) -> LossOutput:
    """The surrogate of any ratio ``[N]`` that carries the gradient."""
    bounded = ratio.clamp(1.0 - objective.clip_low, 1.0 + objective.clip_high)
    free, held = ratio * advantages, bounded * advantages
    return LossOutput(-torch.minimum(free, held), ratio.detach(), held.detach() < free.detach())
