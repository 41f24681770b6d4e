"""Engines of low precision, simulated: values are rounded as a quantised kernel rounds them.

``fp8_simulated`` stands for the usual W8A8 engine: weights in e4m3 with one float32 scale an output
channel, activations in e4m3 with one scale a token, taken from the token itself (dynamic). Both are
rounded, multiplied in float32 and the product is rounded to bfloat16, which is what an fp8 kernel
with a float32 accumulator computes. ``int4_simulated`` rounds weights alone (W4A16): symmetric, one
scale for 32 inputs of an output channel.

As in SGLang's and vLLM's fp8 and int4 checkpoints, all attention projections and experts are
quantised; embeddings, norms, the output head, the KV cache and the router are not: a router reads
the bfloat16 hidden state, before that is rounded for the experts, with bfloat16 weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

Rounding = Callable[[torch.Tensor], torch.Tensor]

_E4M3_MAX = 448.0
_INT4_MAX = 7
_INT4_GROUP = 32


@dataclass(frozen=True)
class Quantization:
    """How an engine rounds; both functions take and give float32 of one shape."""

    weights: Rounding  # [..., out, in]
    activations: Rounding  # [..., in]


def round_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Nearest e4m3 multiples of a scale that puts each row's largest magnitude at 448.

    ``values`` ``[..., n]`` float32, one scale over the last axis. A row of zeros stays zero.
    """
    scale = values.abs().amax(dim=-1, keepdim=True).clamp_(min=1e-12) / _E4M3_MAX
    return (values / scale).to(torch.float8_e4m3fn).float() * scale


def round_int4(values: torch.Tensor) -> torch.Tensor:
    """Nearest of -7..7 times a scale, one scale for 32 neighbours of the last axis.

    ``values`` ``[..., n]`` float32; an n that 32 does not divide has one scale a row.
    """
    group = _INT4_GROUP if values.shape[-1] % _INT4_GROUP == 0 else values.shape[-1]
    grouped = values.unflatten(-1, (-1, group))
    scale = grouped.abs().amax(dim=-1, keepdim=True).clamp_(min=1e-12) / _INT4_MAX
    return ((grouped / scale).round() * scale).flatten(-2)


def _unchanged(values: torch.Tensor) -> torch.Tensor:
    return values


QUANTIZATIONS: dict[str, Quantization] = {
    "fp8_simulated": Quantization(weights=round_e4m3, activations=round_e4m3),
    "int4_simulated": Quantization(weights=round_int4, activations=_unchanged),
}


class QuantizedLinear(torch.nn.Module):
    """A projection without bias; ``weight`` ``[out, in]`` is kept in float32, rounded."""

    def __init__(self, linear: torch.nn.Linear, quantization: Quantization) -> None:
        super().__init__()
        if linear.bias is not None:
            raise ValueError("simulated quantisation: got a bias, expected a projection without")
        self.weight = torch.nn.Parameter(linear.weight.detach().float(), requires_grad=False)
        self._quantization = quantization

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., in]`` → ``[..., out]`` in the dtype of ``hidden``."""
        rounded = self._quantization.activations(hidden.float())
        return F.linear(rounded, self.weight).to(hidden.dtype)


def quantize(model: PreTrainedModel, quantization: Quantization) -> None:
    """Mutating: swap the attention projections and round all quantised weights in place."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, torch.nn.Linear) and name in _PROJECTIONS:
                setattr(module, name, QuantizedLinear(child, quantization))
        if _is_experts(module):
            for name in ("gate_up_proj", "down_proj"):
                held = getattr(module, name).detach().float()
                setattr(module, name, torch.nn.Parameter(held, requires_grad=False))
    round_weights(model, quantization)


@torch.no_grad()
def round_weights(model: PreTrainedModel, quantization: Quantization) -> None:
    """Mutating: round what ``quantize`` swapped, after new values were copied into it.

    Values pass through bfloat16 first, as when an engine quantises a bfloat16 checkpoint.
    """
    for weight in _quantized_weights(model):
        weight.copy_(quantization.weights(weight.to(torch.bfloat16).float()))


_PROJECTIONS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})


def _is_experts(module: torch.nn.Module) -> bool:
    return hasattr(module, "gate_up_proj") and hasattr(module, "down_proj")


def _quantized_weights(model: PreTrainedModel) -> Iterator[torch.Tensor]:
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            yield module.weight
        elif _is_experts(module):
            yield from (module.gate_up_proj, module.down_proj)  # type: ignore[misc]
