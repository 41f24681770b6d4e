"""The reference: transformers' Qwen3-MoE in one process, its routers told which experts to use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from parallel_data import MOE_LAYERS

from agent_rl.types import TrainSample


class ForcedRouter(torch.nn.Module):
    """A Qwen3-MoE router whose set is given; its gates are the live softmax over that set."""

    def __init__(self, router: torch.nn.Module) -> None:
        super().__init__()
        self.weight = router.weight
        self.chosen = torch.zeros(0, dtype=torch.int64)  # [T, K], set before a forward
        self.live = torch.zeros(0, dtype=torch.int64)  # [T, K] what it would have chosen

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores = F.linear(hidden.flatten(0, -2), self.weight)
        self.live = scores.topk(self.chosen.shape[1], dim=-1).indices
        gates = scores.softmax(dim=-1, dtype=torch.float32).gather(1, self.chosen)
        return scores, gates / gates.sum(dim=-1, keepdim=True), self.chosen


class ForcedPolicy:
    """Float32, one sequence at a time, nothing padded."""

    def __init__(self, folder: Path) -> None:
        from transformers import Qwen3MoeForCausalLM

        self.model = Qwen3MoeForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        self._routers = []
        for layer in MOE_LAYERS:
            mlp = self.model.model.layers[layer].mlp
            mlp.gate = ForcedRouter(mlp.gate)
            self._routers.append(mlp.gate)

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
