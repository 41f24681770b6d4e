"""The reference: transformers' own model in one process, its routers told which experts to use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parallel_data import MOE_LAYERS

from agent_rl.types import TrainSample


class ForcedRouter:
    """A router whose set is given; its gates come from the live logits of that set.

    Qwen3-MoE: softmax over all logits; DeepSeek-V3 (arXiv 2412.19437, eq. 12-16): sigmoid of each
    times a factor, without the selection bias. Both are divided by the sum over the set.
    """

    def __init__(self, gate: torch.nn.Module, config: Any) -> None:
        self.chosen = torch.zeros(0, dtype=torch.int64)  # [T, K], set before a forward
        self.live = torch.zeros(0, dtype=torch.int64)  # [T, K] what it would have chosen
        self._sigmoid = config.model_type == "deepseek_v3"
        self._factor = config.routed_scaling_factor if self._sigmoid else 1.0
        gate.register_forward_hook(self._force)

    def _force(self, gate: Any, args: Any, out: Any) -> tuple[torch.Tensor, ...]:
        logits, _, self.live = out
        scores = logits.float().sigmoid() if self._sigmoid else logits.float().softmax(-1)
        gates = scores.gather(1, self.chosen)
        return logits, gates / gates.sum(dim=-1, keepdim=True) * self._factor, self.chosen


class ForcedPolicy:
    """Float32, one sequence at a time, nothing padded."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        layers = self.model.model.layers
        self._routers = [ForcedRouter(layers[i].mlp.gate, self.model.config) for i in MOE_LAYERS]

    def logprobs(self, sample: TrainSample) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the sampled tokens ``[N]``, and which layers flipped by fed token ``[T-1, L]``."""
        fed = len(sample.token_ids) - 1
        rows = torch.from_numpy(sample.routed_experts.gather(stop=fed)[0].astype(np.int64))
        for slot, router in enumerate(self._routers):
            router.chosen = rows[:, slot]
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))
        logits = self.model(ids[None, :-1]).logits[0]
        picked = logits.log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
        flips = [
            (router.live.sort(-1).values != router.chosen.sort(-1).values).any(-1)
            for router in self._routers
        ]
        return picked[torch.from_numpy(sample.loss_mask[1:])], torch.stack(flips, dim=1)

    def gradients(self, samples: Sequence[TrainSample]) -> dict[str, torch.Tensor]:
        """Of the mean over sampled tokens of ``-A logp``: GRPO's where the ratio is 1."""
        total, count = torch.zeros(()), 0
        for sample in samples:
            if len(sample.token_ids) < 2:
                continue
            values, _ = self.logprobs(sample)
            advantages = torch.from_numpy(sample.advantages[1:][sample.loss_mask[1:]])
            total, count = total - (values * advantages).sum(), count + len(values)
        self.model.zero_grad()
        (total / count).backward()
        return {
            name: parameter.grad
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }
