"""Latent attention of the portable layers, right under tensor parallelism too.

All heads share one rotated key per token, the last ``rope_dim`` outputs of the down projection of
keys and values. Megatron shares that projection out by outputs where it is no Transformer Engine
layer, and gathers them with an operation whose backward hands every rank its own part of its own
gradient. For the rotated key that is the gradient of this rank's heads alone: the other ranks' part
of it is lost, for the rows of the projection that make the key and for every layer below.

Here the down projections are whole on every rank, as Transformer Engine's are. Under sequence
parallelism a rank then projects its own positions only and gathers the rotated key along them,
whose backward sums over the ranks; the latents need no gathering at all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from agent_rl.trainer import cpu_backend  # noqa: F401  # before megatron: quiet import

# isort: split
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig


class WholeLinear(MegatronModule):
    """A linear layer without bias that every tensor-parallel rank holds whole.

    Under sequence parallelism every rank applies it to positions of its own, and Megatron sums its
    gradient over them.
    """

    def __init__(self, config: MLATransformerConfig, in_width: int, out_width: int) -> None:
        super().__init__(config=config)
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.empty(out_width, in_width, dtype=config.params_dtype, device=device)
        )
        if config.perform_initialization and config.init_method is not None:
            config.init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """``[s, b, in_width]`` → ``[s, b, out_width]``, and Megatron's place for a bias."""
        return F.linear(hidden, self.weight), None


class SpecifiedAttention(MLASelfAttention):
    """Megatron's latent attention, of exactly the parts that its spec names."""

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        """Return the parts by name; Megatron 0.16 calls nothing of this name and takes them so.

        0.19.2 would put a norm before queries that are not compressed, which no family here has.
        """
        return vars(submodules)


class LatentAttention(SpecifiedAttention):
    """Megatron's latent attention with down projections that are whole on every rank.

    Megatron accepts only its own classes for them in a layer spec; from what they return it tells
    whether they are shared out.
    """

    def __init__(
        self, config: MLATransformerConfig, submodules: MLASelfAttentionSubmodules, **options: Any
    ) -> None:
        super().__init__(config, submodules, **options)
        hidden = config.hidden_size
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = WholeLinear(config, hidden, config.q_lora_rank)
        width = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = WholeLinear(config, hidden, width)
