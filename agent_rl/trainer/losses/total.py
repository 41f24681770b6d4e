"""The whole loss of a configuration: a policy loss, its correction and its penalties."""

from __future__ import annotations

from dataclasses import replace

from agent_rl.config.objective import Objective, correction_bounds, objective
from agent_rl.config.schema import AlgorithmConfig
from agent_rl.trainer.losses.cispo import clipped_weight
from agent_rl.trainer.losses.clipped import clipped_surrogate
from agent_rl.trainer.losses.correction import CORRECTIONS
from agent_rl.trainer.losses.gspo import sequence_ratio
from agent_rl.trainer.losses.likelihood import weighted_likelihood
from agent_rl.trainer.losses.loss_inputs import Loss, LossInputs, LossOutput
from agent_rl.trainer.losses.reference_kl import k3_to_reference

# Another policy loss is a file, an entry here, its defaults in ``agent_rl.config.objective`` and
# its name in ``AlgorithmConfig``; the tests of losses then want a float64 reference of it.
LOSSES: dict[str, Loss] = {
    "grpo": Loss(clipped_surrogate, needs_old=True),
    "dr_grpo": Loss(clipped_surrogate, needs_old=True),
    "dapo": Loss(clipped_surrogate, needs_old=True),
    "gspo": Loss(sequence_ratio, needs_old=True),
    "cispo": Loss(clipped_weight, needs_old=True),
    "sft": Loss(weighted_likelihood, needs_old=False),
}


class TotalLoss:
    """``weight · policy + kl_weight · KL(π_θ ‖ π_ref) - entropy_weight · H`` of every token.

    All three are then reduced alike: the KL as in GRPO (arXiv 2402.03300, eq. 3), the entropy as in
    verl and slime, where TRL takes its mean over tokens whatever the loss. ``H`` is of the
    distribution at the sampling temperature.

    Example:
        >>> total = TotalLoss(AlgorithmConfig(loss="gspo", correction="icepop"))
        >>> total(inputs).per_token.sum().backward()
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self._config = config
        self._loss = LOSSES[config.loss]
        self.objective: Objective = objective(config)
        self.needs_old = self._loss.needs_old
        self.needs_reference = config.kl_weight > 0
        self.needs_entropy = config.entropy_weight > 0

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """``inputs`` must hold what ``needs_reference`` and ``needs_entropy`` ask for."""
        out = self._loss.function(inputs, self.objective)
        per_token, details = out.per_token, dict(out.details)
        details["policy_loss"] = per_token.detach()
        if self._config.correction != "none":
            low, high = correction_bounds(self._config)
            weights = CORRECTIONS[self._config.correction](inputs, low, high).detach()
            per_token = per_token * weights
            details["correction_weight"] = weights
            details["correction_masked"] = (weights == 0).float()
        if self.needs_reference:
            assert inputs.ref_logprobs is not None
            kl = k3_to_reference(inputs.logprobs, inputs.ref_logprobs)
            per_token = per_token + self._config.kl_weight * kl
            details["kl_reference"] = kl.detach()
        if self.needs_entropy:
            assert inputs.entropy is not None
            per_token = per_token - self._config.entropy_weight * inputs.entropy
            details["entropy_update"] = inputs.entropy.detach()
        return replace(out, per_token=per_token, details=details)
