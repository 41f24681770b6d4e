"""Expert products whose result for a token does not depend on the other tokens of the batch.

CPU matrix products of fewer than four float32 rows take another kernel (a matrix-vector one) and
round differently, so with plain grouped products a token's low bits depend on how many neighbours
chose the same expert. Here every expert's group is padded to a multiple of ``_ROWS`` rows.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

BATCH_INVARIANT = "agent_rl_batch_invariant"
_ROWS = 8


def batch_invariant_experts(
    module: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Gated experts over ``hidden_states`` ``[N, H]``: ids and weights are ``[N, K]``.

    Same signature and value as the functions in transformers' ``ALL_EXPERTS_FUNCTIONS``.
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

    buffer = hidden_states.new_zeros(int(ends[-1]), hidden_states.shape[1])
    buffer[place] = hidden_states[order // moe_top_k]
    offsets = ends.to(torch.int32)
    gate, up = F.grouped_mm(buffer, gate_up.transpose(1, 2), offs=offsets).chunk(2, dim=-1)
    act_fn = module.act_fn
    assert callable(act_fn)
    product = F.grouped_mm(act_fn(gate) * up, down.transpose(1, 2), offs=offsets)

    output = torch.empty_like(hidden_states[order // moe_top_k])
    output[order] = product[place]
    weighted = output.view(num_tokens, moe_top_k, -1) * top_k_weights[..., None]
    return weighted.sum(dim=1).to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(BATCH_INVARIANT, batch_invariant_experts)
