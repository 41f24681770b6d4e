"""The same RL step in plain transformers: what Megatron's step is compared with.

Equal weights, micro-batches, loss and optimizer: a forward for the old log-probs, forward and
backward of the clipped surrogate, gradient clipping, AdamW. Live routing. One thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import Qwen3MoeForCausalLM

from agent_rl.config.schema import RunConfig
from agent_rl.trainer.batch import MicroBatch

EXPERTS = ("grouped_mm", "eager")  # batched_mm gathers weights per token: far slower in training


class TransformersStep:
    """A float32 policy with its optimizer; ``step`` mutates it."""

    def __init__(self, folder: Path, config: RunConfig, experts: str) -> None:
        self._model = Qwen3MoeForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            experts_implementation=experts,
            attn_implementation="sdpa",
        ).train()
        optim, self._algorithm = config.optim, config.algorithm
        self._clip_grad = optim.clip_grad
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            fused=True,
        )

    def step(self, batches: Sequence[MicroBatch], clip: tuple[float, float]) -> float:
        """One update over ``batches``; returns the loss. ``clip`` is (low, high)."""
        with torch.no_grad():
            old = [self._logprobs(batch) for batch in batches]
        self._optimizer.zero_grad()
        total = 0.0
        units = sum(int(batch.units.sum()) for batch in batches)
        for batch, before in zip(batches, old, strict=True):
            ratio = (self._logprobs(batch) - before).exp()
            advantages = batch.advantages[batch.loss_mask]
            bounded = ratio.clamp(1 - clip[0], 1 + clip[1])
            loss = -torch.minimum(ratio * advantages, bounded * advantages)
            loss = (loss * batch.weights[batch.loss_mask]).sum() / units
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_grad)
        self._optimizer.step()
        return total

    def _logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Log-probs ``[N]`` of the sampled tokens; the head runs on their positions only."""
        hidden = self._model.model(input_ids=batch.token_ids, use_cache=False).last_hidden_state
        logits = self._model.lm_head(hidden[batch.loss_mask]).float()
        labels = batch.labels[batch.loss_mask]
        return torch.log_softmax(logits, dim=-1).gather(1, labels[:, None]).squeeze(1)
