"""GSPO: one importance ratio per sequence."""

from __future__ import annotations

from agent_rl.config.objective import Objective
from agent_rl.trainer.losses.clipped import bounded_surrogate
from agent_rl.trainer.losses.loss_inputs import LossInputs, LossOutput, ratio_of


def sequence_ratio(inputs: LossInputs, objective: Objective) -> LossOutput:
    """``-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)``, ``s = exp(mean_t log w_t)``.

    arXiv 2507.18071, eq. 5 and 7: the mean runs over the sequence's sampled tokens, wherever they
    lie. Written as its eq. 14 (GSPO-token), ``s_t = sg(s) · π_t / sg(π_t)``: values and, where all
    tokens of a sequence share one advantage, gradients are those of eq. 5, and the gradient needs
    no exchange between ranks. verl and SkyRL write it the same way.

    That holds under the ``sequence`` reduction, eq. 5's ``1/G Σ``; under ``token`` a long sequence
    counts for more.
    """
    mean = inputs.sequence_means(inputs.logprobs - inputs.old_logprobs)
    held = mean[inputs.sequences].to(inputs.logprobs.dtype)
    ratio = ratio_of(held + (inputs.logprobs - inputs.logprobs.detach()))
    return bounded_surrogate(ratio, inputs.advantages, objective)
