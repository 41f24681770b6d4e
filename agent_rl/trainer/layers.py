"""The portable layer spec: Megatron's transformer layer without Transformer Engine.

Axis letters: s positions, b sequences, h heads, d head width, T (token, expert) pairs after
dispatch, E local experts, H hidden width, I expert width.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from agent_rl.trainer import cpu_backend  # noqa: F401  # before megatron: quiet import
from agent_rl.trainer.latent_attention import LatentAttention

# isort: split
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm whose gradient Megatron all-reduces under sequence parallelism.

    Megatron's own wrapper around it refuses sequence parallelism.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class SDPAttention(MegatronModule):
    """Causal attention on ``scaled_dot_product_attention``.

    Takes padded ``[s, b, h, d]`` or, with ``packed_seq_params``, packed ``[t, h, d]``. Under
    context parallelism either comes as zigzag shards (rank r holds chunks r and 2c-1-r of every
    sequence); keys and values are then gathered over the context-parallel group.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels or 1)
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        if packed_seq_params is not None:
            return self._packed(query, key, value, packed_seq_params.cu_seqlens_q.tolist())
        key, value, mask = self._gathered(key), self._gathered(value), None
        if self.cp_group.size() > 1:
            mask = self._zigzag_mask(query.shape[0], query.device)
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [b, h, s, d]
        out = self._attend(query, key, value, mask)
        return out.permute(2, 0, 1, 3).flatten(2)  # [s, b, h*d]

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )

    def _packed(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        boundaries: Sequence[int],
    ) -> torch.Tensor:
        """``boundaries`` are those of whole sequences; a rank holds 1/c of each of them."""
        size = self.cp_group.size()
        # [c, t, h, d]: a sequence's keys lie at the same place in every rank's part
        keys, values = (self._gathered(x).unflatten(0, (size, -1)) for x in (key, value))
        outs = []
        for start, stop in itertools.pairwise(b // size for b in boundaries):
            q, k, v = (
                x.transpose(0, 1)[None]
                for x in (
                    query[start:stop],
                    keys[:, start:stop].flatten(0, 1),
                    values[:, start:stop].flatten(0, 1),
                )
            )
            mask = self._zigzag_mask(stop - start, query.device) if size > 1 else None
            outs.append(self._attend(q, k, v, mask)[0].transpose(0, 1))
        return torch.cat(outs).flatten(1)

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` of every context-parallel rank, one behind the other; gradients are summed back."""
        if self.cp_group.size() == 1:
            return x
        return gather_from_sequence_parallel_region(x.contiguous(), group=self.cp_group)

    def _zigzag_mask(self, length: int, device: torch.device) -> torch.Tensor:
        """Return the key positions that a local query may see, bool ``[length, length * cp]``."""
        size, half = self.cp_group.size(), length // 2

        def positions(rank: int) -> torch.Tensor:
            first = torch.arange(half, device=device)
            return torch.cat([first + rank * half, first + (2 * size - 1 - rank) * half])

        keys = torch.cat([positions(rank) for rank in range(size)])
        return keys[None] <= positions(self.cp_group.rank())[:, None]


class GroupedExperts(MegatronModule):
    """SwiGLU experts of one rank, each projection one grouped matrix product.

    ``weight1`` is ``[E, 2, I, H]`` (gate, up), ``weight2`` ``[E, H, I]``; expert tensor
    parallelism splits I. Megatron's grouped experts need CUTLASS or Transformer Engine.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: Any = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        self.weight1: torch.nn.Parameter
        self.weight2: torch.nn.Parameter
        width, parts = config.moe_ffn_hidden_size or 0, pg_collection.expt_tp.size()
        if width % parts:
            raise ValueError(
                f"expert width not divisible: got={width} expected=multiple of {parts}"
            )
        shape1 = (num_local_experts, 2, width // parts, config.hidden_size)
        shape2 = (num_local_experts, config.hidden_size, width // parts)
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        for name, shape, split_axis in (("weight1", shape1, 2), ("weight2", shape2, 2)):
            weight = torch.nn.Parameter(
                torch.empty(shape, dtype=config.params_dtype, device=device)
            )
            if config.perform_initialization and config.init_method is not None:
                config.init_method(weight)
            tensor_parallel.set_tensor_model_parallel_attributes(
                weight, is_parallel=parts > 1, dim=split_axis, stride=1
            )
            self.register_parameter(name, weight)

    def forward(
        self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, gates: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Tokens ``[T, H]`` sorted by expert, counts ``[E]``, gates ``[T]`` → ``[T, H]``."""
        ends = tokens_per_expert.to(device=tokens.device).cumsum(0).to(torch.int32)
        hidden = F.grouped_mm(tokens, self.weight1.flatten(1, 2).transpose(1, 2), offs=ends)
        gate, up = hidden.chunk(2, dim=-1)
        hidden = (F.silu(gate) * up * gates.unsqueeze(-1)).to(tokens.dtype)
        return F.grouped_mm(hidden, self.weight2.transpose(1, 2), offs=ends), None


def portable_block_spec(
    config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Layers of a pipeline stage's chunk, dense or MoE as ``config.moe_layer_freq`` says."""
    dense, moe = _layer_spec(config, None), _layer_spec(config, config.num_moe_experts)
    pattern = config.moe_layer_freq
    if not isinstance(pattern, list) or len(pattern) != config.num_layers:
        raise ValueError(f"moe_layer_freq: got={pattern!r} expected={config.num_layers} flags")
    first = get_transformer_layer_offset(config, vp_stage)
    flags = pattern[first : first + get_num_layers_to_build(config, vp_stage)]
    norm: Any = RMSNorm
    return TransformerBlockSubmodules(
        layer_specs=[moe if is_moe else dense for is_moe in flags], layer_norm=norm
    )


def _layer_spec(config: TransformerConfig, num_experts: int | None) -> ModuleSpec:
    latent = config.multi_latent_attention
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=latent,
        normalization="RMSNorm",
    )
    layer: Any = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = SDPAttention
    if latent:
        layer.self_attention.module = LatentAttention
        attention.q_layernorm = attention.kv_layernorm = RMSNorm
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if num_experts is not None:
        layer.mlp = _moe_spec()
    return spec


def _moe_spec() -> ModuleSpec:
    """A MoE layer with our experts: Megatron's own spec of it is of another type by version."""
    dense: Any = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    shared: Any = ModuleSpec(module=SharedExpertMLP, submodules=dense)
    experts: Any = ModuleSpec(module=GroupedExperts)
    return ModuleSpec(
        module=MoELayer, submodules=MoESubmodules(experts=experts, shared_experts=shared)
    )
