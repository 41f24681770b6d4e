"""Supervised warm start: likelihood weighted by the advantage."""

from __future__ import annotations

import torch

from agent_rl.config.objective import Objective
from agent_rl.trainer.losses.loss_inputs import LossInputs, LossOutput


def weighted_likelihood(inputs: LossInputs, objective: Objective) -> LossOutput:
    """``-A logp``: the advantage is the token's weight."""
    ones = torch.ones_like(inputs.advantages)
    return LossOutput(-inputs.advantages * inputs.logprobs, ones, ones.bool().logical_not())
