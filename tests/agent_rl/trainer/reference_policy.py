"""A Qwen3-MoE in float64 written from the formulas, to check Megatron's values and gradients.

Every expert is computed for every token and weighted by the gate, zero outside the chosen set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from agent_rl.model.shape import ModelShape

Weights = Mapping[str, torch.Tensor]


def logits(
    weights: Weights,
    shape: ModelShape,
    ids: torch.Tensor,
    rows: torch.Tensor | None = None,
    router_logits: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """``[T, V]`` of one sequence ``ids [T]``; ``rows [T, L, K]`` replaces the routers' choice.

    ``router_logits`` is appended to: ``[T, E]`` a MoE layer.
    """
    hidden = weights["model.embed_tokens.weight"][ids]
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."

        def get(name: str, prefix: str = prefix) -> torch.Tensor:
            return weights[prefix + name]

        normed = _norm(hidden, get("input_layernorm.weight"), shape)
        hidden = hidden + _attention(normed, get, shape)
        normed = _norm(hidden, get("post_attention_layernorm.weight"), shape)
        if layer in shape.moe_layers:
            slot = shape.moe_layers.index(layer)
            chosen = None if rows is None else rows[:, slot].long()
            hidden = hidden + _experts(normed, get, shape, chosen, router_logits)
        else:
            gate, up = normed @ get("mlp.gate_proj.weight").T, normed @ get("mlp.up_proj.weight").T
            hidden = hidden + (F.silu(gate) * up) @ get("mlp.down_proj.weight").T
    hidden = _norm(hidden, weights["model.norm.weight"], shape)
    head = "model.embed_tokens.weight" if shape.tie_embeddings else "lm_head.weight"
    return hidden @ weights[head].T


def gates(scores: torch.Tensor, chosen: torch.Tensor, normalised: bool) -> torch.Tensor:
    """``g_i = I_i exp(s_i) / Σ_j I_j exp(s_j)`` (arXiv 2510.11370); without the sum over the chosen
    where the model does not normalise. ``[T, E]``."""
    inside = torch.zeros_like(scores).scatter(1, chosen, 1.0)
    probabilities = scores.softmax(-1) * inside
    return probabilities / probabilities.sum(-1, keepdim=True) if normalised else probabilities


def _experts(
    x: torch.Tensor,
    get: Callable[[str], torch.Tensor],
    shape: ModelShape,
    chosen: torch.Tensor | None,
    router_logits: list[torch.Tensor] | None,
) -> torch.Tensor:
    scores = x @ get("mlp.gate.weight").T
    if router_logits is not None:
        router_logits.append(scores)
    chosen = scores.topk(shape.moe_top_k).indices if chosen is None else chosen
    weight = gates(scores, chosen, shape.norm_topk_prob)
    projected = torch.einsum("th,eih->tei", x, get("mlp.experts.gate_up_proj"))
    gate, up = projected.chunk(2, dim=-1)
    out = torch.einsum("tei,ehi->teh", F.silu(gate) * up, get("mlp.experts.down_proj"))
    return torch.einsum("te,teh->th", weight, out)


def _attention(
    x: torch.Tensor, get: Callable[[str], torch.Tensor], shape: ModelShape
) -> torch.Tensor:
    def heads(kind: str, count: int) -> torch.Tensor:
        return (x @ get(f"self_attn.{kind}_proj.weight").T).view(len(x), count, -1).transpose(0, 1)

    q = _norm(heads("q", shape.num_heads), get("self_attn.q_norm.weight"), shape)
    k = _norm(heads("k", shape.num_kv_heads), get("self_attn.k_norm.weight"), shape)
    v = heads("v", shape.num_kv_heads)
    q, k = _rotate(q, shape), _rotate(k, shape)
    repeat = shape.num_heads // shape.num_kv_heads
    k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
    scores = q @ k.transpose(1, 2) / shape.head_dim**0.5
    future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    out = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
    return out.transpose(0, 1).reshape(len(x), -1) @ get("self_attn.o_proj.weight").T


def _rotate(x: torch.Tensor, shape: ModelShape) -> torch.Tensor:
    half = shape.head_dim // 2
    frequency = shape.rope_theta ** (-torch.arange(half, dtype=x.dtype) / half)
    angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * frequency
    first, second = x[..., :half], x[..., half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _norm(x: torch.Tensor, weight: torch.Tensor, shape: ModelShape) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + shape.norm_eps) * weight
