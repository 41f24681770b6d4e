"""Policy losses on the sampled tokens of a micro-batch, and what may be added to them."""

from agent_rl.trainer.losses.loss_inputs import Loss, LossInputs, LossOutput
from agent_rl.trainer.losses.total import LOSSES, TotalLoss

__all__ = ["LOSSES", "Loss", "LossInputs", "LossOutput", "TotalLoss"]
