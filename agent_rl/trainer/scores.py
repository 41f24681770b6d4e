"""Scores of samples, taken back from the padded layout to each sample's own token order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from agent_rl.trainer import logprobs
from agent_rl.trainer.batch import MicroBatch


@dataclass(frozen=True)
class SampleScore:
    """Log-probs of one sample under the trainer's current weights, at the config's temperature."""

    logprobs: np.ndarray  # [T] float32, 0 where not sampled
    full_logprobs: np.ndarray | None  # [N, V] float32 of the N sampled tokens, in order
    live_experts: np.ndarray | None  # [T-1, L, K] what the live routers chose, or would have


def batch_scores(
    batch: MicroBatch, scaled: torch.Tensor, live: torch.Tensor | None, *, full_logits: bool
) -> dict[int, SampleScore]:
    """Scores by position in the step's sample list.

    ``scaled`` are the sampled tokens' logits over temperature ``[N, V]``, ``live`` the live
    routers' choice ``[L, S * B, K]`` in Megatron's token order.
    """
    labels = batch.labels[batch.loss_mask].to(scaled.device)
    values = logprobs.token_logprobs(scaled, labels).cpu()
    full = logprobs.full_logprobs(scaled).cpu() if full_logits else None
    routed = None if live is None else live.unflatten(1, batch.present.shape).cpu()  # [L, S, B, K]
    owner = batch.loss_mask.nonzero()[:, 0]  # which sequence a sampled token belongs to
    scores: dict[int, SampleScore] = {}
    for b, (sample, length) in enumerate(zip(batch.samples, batch.lengths, strict=True)):
        own = owner == b
        row = np.zeros(length + 1, dtype=np.float32)
        row[1:][batch.loss_mask[b, :length].numpy()] = values[own].numpy()
        scores[sample] = SampleScore(
            row,
            None if full is None else full[own].numpy(),
            None if routed is None else routed[:, :length, b].movedim(0, 1).numpy(),
        )
    return scores
