"""Distance to a frozen reference policy, as a term of the loss."""

from __future__ import annotations

import torch

from agent_rl.trainer.losses.loss_inputs import MAX_LOG_RATIO


def k3_to_reference(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """``r - 1 - log r`` with ``r = π_ref / π_θ`` on the sampled token, ``[N]``, never negative.

    The estimate of KL(π_θ ‖ π_ref) that GRPO adds to its loss (arXiv 2402.03300, eq. 4); its
    gradient is ``(1 - r) ∇ log π_θ``, and none where ``r`` is beyond ``exp(MAX_LOG_RATIO)``.
    verl and SkyRL hold the value at 10 and lose the gradient beyond ``r`` of about 13.6.

    Unbiased for tokens of π_θ itself: from a step's second update on they are the old policy's,
    and no weight makes up for it, as in GRPO and unlike DeepSeek-V3.2 (arXiv 2512.02556), whose
    ``π_θ / π_old`` on this term slime and TRL offer as an option.
    """
    log_ratio = (ref_logprobs - logprobs).clamp(max=MAX_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio
