"""Engines of low precision, simulated: values are rounded as a quantised kernel rounds them.

``fp8_simulated`` stands for the usual W8A8 engine: weights in e4m3 with one float32 scale an output
channel, activations in e4m3 with one scale per token, taken from that token (dynamic). Both are
rounded, multiplied in float32 and the product is rounded to bfloat16, which is what an fp8 kernel
with a float32 accumulator computes. ``int4_simulated`` rounds weights alone (W4A16): symmetric, one
scale for 32 inputs of an output channel.

As in SGLang's and vLLM's fp8 and int4 checkpoints, all attention projections and experts are
quantised; embeddings, norms, the output head, the KV cache and the router are not: a router reads
the bfloat16 hidden state, before that is rounded for the experts, with bfloat16 weights.

``router_int4_simulated`` is the opposite, and no engine anyone ships: the router's choice alone is
of low precision (see ``CoarseRouter``), everything else is the bfloat16 engine. It is there for a
controlled experiment, in which routing is what engine and trainer disagree about and replay of the
chosen sets takes the disagreement away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

Rounding = Callable[[torch.Tensor], torch.Tensor]

_E4M3_MAX = 448.0
_INT4_MAX = 7
_INT4_GROUP = 32


@dataclass(frozen=True)
class Quantization:
    """Rounding of an engine; functions take and give float32 of one shape, None does not round."""

    weights: Rounding | None = None  # [..., out, in], of attention projections and experts
    activations: Rounding | None = None  # [..., in], their inputs
    router: Rounding | None = None  # [E, in], the weights that experts are chosen by


def round_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Nearest e4m3 multiples of a scale that puts each row's largest magnitude at 448.

    ``values`` ``[..., n]`` float32, one scale over the last axis. A row of zeros stays zero.
    """
    scale = values.abs().amax(dim=-1, keepdim=True).clamp_(min=1e-12) / _E4M3_MAX
    return (values / scale).to(torch.float8_e4m3fn).float() * scale


def round_int4(values: torch.Tensor) -> torch.Tensor:
    """Round to the nearest of -7..7 times a scale, one scale for 32 neighbours of the last axis.

    ``values`` ``[..., n]`` float32; an n that 32 does not divide has one scale per row.
    """
    group = _INT4_GROUP if values.shape[-1] % _INT4_GROUP == 0 else values.shape[-1]
    grouped = values.unflatten(-1, (-1, group))
    scale = grouped.abs().amax(dim=-1, keepdim=True).clamp_(min=1e-12) / _INT4_MAX
    return ((grouped / scale).round() * scale).flatten(-2)


QUANTIZATIONS: dict[str, Quantization] = {
    "fp8_simulated": Quantization(weights=round_e4m3, activations=round_e4m3),
    "int4_simulated": Quantization(weights=round_int4),
    "router_int4_simulated": Quantization(router=round_int4),
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
        rounding = self._quantization.activations
        inputs = hidden.float()
        rounded = inputs if rounding is None else rounding(inputs)
        return F.linear(rounded, self.weight).to(hidden.dtype)


class CoarseRouter(Qwen3MoeTopKRouter):
    """Chooses experts by rounded weights and weighs the chosen ones by the unrounded ones.

    A router whose gates were rounded as well would differ in value too, and replay hands over sets,
    not gates. Here a trainer that replays the chosen sets computes what this engine computed, up to
    bfloat16. Its ``state_dict`` is that of the router it stands for.
    """

    def __init__(self, router: Qwen3MoeTopKRouter, rounding: Rounding) -> None:
        torch.nn.Module.__init__(self)
        self.top_k, self.num_experts = router.top_k, router.num_experts
        self.norm_topk_prob, self.hidden_dim = router.norm_topk_prob, router.hidden_dim
        self.weight = router.weight
        self.register_buffer("choosing", torch.empty_like(self.weight).float(), persistent=False)
        self._rounding = rounding
        self.round_weight()

    @torch.no_grad()
    def round_weight(self) -> None:
        """Mutating: choose by what ``weight`` is now."""
        self.get_buffer("choosing").copy_(self._rounding(self.weight.float()))

    def forward(
        self, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``[..., in]`` → scores of the choice ``[N, E]``, gates and chosen ids ``[N, K]``."""
        hidden = hidden_states.reshape(-1, self.hidden_dim)
        scores = F.linear(hidden.float(), self.get_buffer("choosing"))
        chosen = scores.topk(self.top_k, dim=-1).indices
        gates = F.linear(hidden, self.weight).softmax(-1, dtype=torch.float).gather(-1, chosen)
        if self.norm_topk_prob:
            gates = gates / gates.sum(-1, keepdim=True)
        return scores, gates.to(hidden.dtype), chosen


def quantize(model: PreTrainedModel, quantization: Quantization) -> None:
    """Mutating: swap the projections and routers that round, and round all quantised weights."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if swapped := _rounding_twin(name, child, quantization):
                setattr(module, name, swapped)
        if quantization.weights is not None and _is_experts(module):
            for name in ("gate_up_proj", "down_proj"):
                held = getattr(module, name).detach().float()
                setattr(module, name, torch.nn.Parameter(held, requires_grad=False))
    round_weights(model, quantization)


@torch.no_grad()
def round_weights(model: PreTrainedModel, quantization: Quantization) -> None:
    """Mutating: round what ``quantize`` swapped, after new values were copied into it.

    Values pass through bfloat16 first, as when an engine quantises a bfloat16 checkpoint.
    """
    for module in model.modules():
        if isinstance(module, CoarseRouter):
            module.round_weight()
    if quantization.weights is not None:
        for weight in _quantized_weights(model):
            weight.copy_(quantization.weights(weight.to(torch.bfloat16).float()))


_PROJECTIONS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})


def _rounding_twin(
    name: str, child: torch.nn.Module, quantization: Quantization
) -> torch.nn.Module | None:
    """Make the module that takes ``child``'s place; None when it stays."""
    if isinstance(child, Qwen3MoeTopKRouter) and quantization.router is not None:
        return CoarseRouter(child, quantization.router)
    if quantization.weights is None or name not in _PROJECTIONS:
        return None
    return QuantizedLinear(child, quantization) if isinstance(child, torch.nn.Linear) else None


def _is_experts(module: torch.nn.Module) -> bool:
    return hasattr(module, "gate_up_proj") and hasattr(module, "down_proj")


def _quantized_weights(model: PreTrainedModel) -> Iterator[torch.Tensor]:
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            yield module.weight
        elif _is_experts(module):
            yield from (module.gate_up_proj, module.down_proj)  # type: ignore[misc]
