"""``transformer_engine.pytorch``: layers under the names Megatron derives from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from transformer_engine.pytorch import distributed, fp8

__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
    "distributed",
    "fp8",
]


def _weight(rows: int, columns: int, dtype: torch.dtype) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(rows, columns, dtype=dtype))


class RMSNorm(torch.nn.Module):
    """Takes its width by either name: Megatron 0.16.1 gives the second."""

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype = torch.float32,
        hidden_size: int | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.eps = eps
        width = normalized_shape or hidden_size
        self.weight = torch.nn.Parameter(torch.ones(width, dtype=params_dtype))
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LayerNorm(RMSNorm):
    """Exists to be named; the covered models have none."""


class Linear(torch.nn.Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        parallel_mode: str | None = None,
        params_dtype: torch.dtype = torch.float32,
        return_bias: bool = False,
        init_method: Callable[[torch.Tensor], object] | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.parallel_mode, self.return_bias = parallel_mode, return_bias
        self.weight = _weight(out_features, in_features, params_dtype)
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(out_features, dtype=params_dtype))
        else:
            self.bias = None

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class LayerNormLinear(Linear):
    def __init__(
        self, in_features: int, out_features: int, eps: float = 1e-5, **options: Any
    ) -> None:
        super().__init__(in_features, out_features, **options)
        dtype = options.get("params_dtype", torch.float32)
        self.eps = eps
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features, dtype=dtype))

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        normed = F.rms_norm(x, self.layer_norm_weight.shape, self.layer_norm_weight, self.eps)
        return F.linear(normed, self.weight, self.bias)


class GroupedLinear(torch.nn.Module):
    """One weight a group of rows: ``weight0``, ``weight1``, …"""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        params_dtype: torch.dtype = torch.float32,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        for i in range(num_gemms):
            self.register_parameter(f"weight{i}", _weight(out_features, in_features, params_dtype))

    def forward(
        self, x: torch.Tensor, m_splits: Sequence[int], is_first_microbatch: bool | None = None
    ) -> torch.Tensor:
        parts = x.split(list(m_splits))
        return torch.cat([F.linear(p, getattr(self, f"weight{i}")) for i, p in enumerate(parts)])


class DotProductAttention(torch.nn.Module):
    """Causal attention over ``[s, b, h, d]``."""

    def __init__(self, *args: Any, softmax_scale: float | None = None, **unused: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        grouped = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.scale, enable_gqa=grouped
        )
        return out.permute(2, 0, 1, 3).flatten(2)
