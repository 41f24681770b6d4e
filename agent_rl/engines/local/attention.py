"""Attention over slot storage: a batched product for one new token, SDPA for several.

Keys and values are held in float32 whatever the model's dtype (bfloat16 values are exact in it):
CPU attention over bfloat16 converts at every step and takes several times as long.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

SLOT_ATTENTION = "agent_rl_slots"


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attend ``query`` ``[B, heads, S, D]`` to float32 ``key``, ``value`` ``[B, kv_heads, T, D]``.

    ``attention_mask`` ``[B, 1, S, T]`` float32 is added to the scores. Returns ``[B, S, heads, D]``
    in the query's dtype, as transformers' attention functions do.
    """
    batch, heads, length, head_dim = query.shape
    kv_heads = key.shape[1]
    if length == 1:
        grouped = (query.float() * scaling).view(batch, kv_heads, heads // kv_heads, head_dim)
        scores = torch.matmul(grouped, key.transpose(2, 3)) + attention_mask
        output = torch.matmul(torch.softmax(scores, dim=-1), value)
    else:
        output = F.scaled_dot_product_attention(
            query.float(),
            key,
            value,
            attn_mask=attention_mask,
            scale=scaling,
            enable_gqa=kv_heads != heads,
        )
    flat = output.reshape(batch, heads, length, head_dim)
    return flat.transpose(1, 2).to(query.dtype).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(SLOT_ATTENTION, slot_attention)
