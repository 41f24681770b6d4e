"""Expert products whose result for a token does not depend on the other tokens of the batch.

CPU matrix products of fewer than four float32 rows take another kernel (a matrix-vector one) and
round differently, so with plain grouped products a token's low bits depend on how many neighbours
chose the same expert. Here every expert's group is padded to a multiple of ``_ROWS`` rows.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from agent_rl.engines.local.quantize import QUANTIZATIONS, Rounding

BATCH_INVARIANT = "agent_rl_batch_invariant"
_ROWS = 8


def batch_invariant_experts(
    module: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    round_activations: Rounding | None = None,
) -> torch.Tensor:
    """Gated experts over ``hidden_states`` ``[N, H]``: ids and weights are ``[N, K]``.

    ``round_activations`` is applied to the input of both products (see ``quantize``). Same
    signature and value as the functions in transformers' ``ALL_EXPERTS_FUNCTIONS``.
    """
    gate_up, down = module.gate_up_proj, module.down_proj  # [E, 2F, H], [E, H, F]
    assert isinstance(gate_up, torch.Tensor)
    assert isinstance(down, torch.Tensor)
    num_tokens, moe_top_k = top_k_index.shape
    expert, order = torch.sort(top_k_index.reshape(-1), stable=True)
    counts = torch.bincount(expert, minlength=gate_up.shape[0])
    padded = (counts + _ROWS - 1) // _ROWS * _ROWS
    ends = padded.cumsum(0)
    shift = (ends - padded) - (counts.cumsum(0) - counts)
    place = torch.arange(expert.numel()) + shift[expert]

    # Products of bfloat16 operands are computed in float32 and rounded, as a bfloat16 kernel does
    # inside: for products this small that takes about half the time.
    dtype = hidden_states.dtype
    buffer = torch.zeros(int(ends[-1]), hidden_states.shape[1])
    rounded = _rounded(hidden_states.float(), round_activations)
    buffer.index_copy_(0, place, rounded.index_select(0, order // moe_top_k))
    offsets = ends.to(torch.int32)
    hidden = F.grouped_mm(buffer, gate_up.float().transpose(1, 2), offs=offsets)
    gate, up = hidden.to(dtype).float().chunk(2, dim=-1)
    act_fn = module.act_fn
    assert callable(act_fn)
    active = _rounded((act_fn(gate).to(dtype) * up).to(dtype).float(), round_activations)
    product = F.grouped_mm(active, down.float().transpose(1, 2), offs=offsets).to(dtype)

    output = hidden_states.new_empty(order.numel(), product.shape[1])
    output.index_copy_(0, order, product.index_select(0, place))
    weighted = output.view(num_tokens, moe_top_k, -1) * top_k_weights[..., None]
    return weighted.sum(dim=1).to(hidden_states.dtype)


def _rounded(values: torch.Tensor, rounding: Rounding | None) -> torch.Tensor:
    return values if rounding is None else rounding(values)


def experts_name(dtype: str) -> str:
    """Return transformers' name of the expert products of an engine of ``dtype``."""
    return f"{BATCH_INVARIANT}_{dtype}" if dtype in QUANTIZATIONS else BATCH_INVARIANT


ALL_EXPERTS_FUNCTIONS.register(BATCH_INVARIANT, batch_invariant_experts)
for _name, _quantization in QUANTIZATIONS.items():
    ALL_EXPERTS_FUNCTIONS.register(
        experts_name(_name),
        partial(batch_invariant_experts, round_activations=_quantization.activations),
    )
