"""Qwen3-MoE: grouped queries with a norm a head, softmax router, dense layers by list or step."""

from __future__ import annotations

from agent_rl.trainer.families.fields import Fields
from agent_rl.trainer.shape import ModelShape, RouterRule


def shape(fields: Fields) -> ModelShape:
    fields.require("hidden_act", "silu")
    fields.require("attention_bias", False)
    fields.require("use_sliding_window", False)
    fields.require_plain_rope()
    hidden, heads = fields.int("hidden_size"), fields.int("num_attention_heads")
    return ModelShape(
        family="qwen3_moe",
        vocab_size=fields.int("vocab_size"),
        hidden_size=hidden,
        num_layers=fields.int("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=fields.int("num_key_value_heads"),
        head_dim=fields.maybe_int("head_dim") or hidden // heads,
        dense_width=fields.int("intermediate_size"),
        expert_width=fields.int("moe_intermediate_size"),
        num_experts=fields.int("num_experts", "num_local_experts"),
        moe_top_k=fields.int("num_experts_per_tok"),
        moe_layers=moe_layers(fields),
        tie_embeddings=fields.bool("tie_word_embeddings"),
        norm_eps=fields.float("rms_norm_eps"),
        rope_theta=fields.rope_theta,
        max_positions=fields.int("max_position_embeddings"),
        router=RouterRule(normalise=fields.bool("norm_topk_prob")),
    )


def moe_layers(fields: Fields) -> tuple[int, ...]:
    """Every ``decoder_sparse_step``-th layer, without ``mlp_only_layers``."""
    step, dense = fields.maybe_int("decoder_sparse_step") or 1, fields.ints("mlp_only_layers")
    count = fields.int("num_hidden_layers")
    return tuple(i for i in range(count) if i not in dense and (i + 1) % step == 0)
