"""CISPO: the importance weight is clipped, the gradient never is."""

from __future__ import annotations

from agent_rl.config.objective import Objective
from agent_rl.trainer.losses.loss_inputs import LossInputs, LossOutput, ratio_of


def clipped_weight(inputs: LossInputs, objective: Objective) -> LossOutput:
    """``-sg(clip(w, 1 - clip_low, 1 + clip_high)) A logp`` with ``w = exp(logp - old logp)``.

    arXiv 2506.13585, eq. 4 and 5. Every token keeps a gradient; ``clipped`` stays empty, and
    ``weight_clipped`` says how many weights were held.

    The paper sets no lower bound and prints no upper one. ``clip_high`` 4 lets weights grow to 5,
    SkyRL's default after arXiv 2510.13786. TRL's ``epsilon_high`` is the largest weight itself: 5
    there is 4 here. verl without settings of its own holds weights within 0.8 and 1.2.
    """
    ratio = ratio_of(inputs.logprobs.detach() - inputs.old_logprobs)
    weight = ratio.clamp(1.0 - objective.clip_low, 1.0 + objective.clip_high)
    held = weight != ratio
    return LossOutput(
        -weight * inputs.advantages * inputs.logprobs,
        ratio,
        held.new_zeros(held.shape),
        {"weight_clipped": held.float()},
    )
