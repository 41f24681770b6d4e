"""Mixtral: every layer has experts, gates are the softmax over the chosen logits."""

from __future__ import annotations

from agent_rl.trainer.families.fields import Fields
from agent_rl.trainer.shape import HFNames, ModelShape


def shape(fields: Fields) -> ModelShape:
    fields.require("hidden_act", "silu")
    fields.require("sliding_window", None)
    fields.require("router_jitter_noise", 0.0)
    fields.require_plain_rope()
    hidden, heads = fields.int("hidden_size"), fields.int("num_attention_heads")
    num_layers, width = fields.int("num_hidden_layers"), fields.int("intermediate_size")
    return ModelShape(
        family="mixtral",
        vocab_size=fields.int("vocab_size"),
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=fields.int("num_key_value_heads"),
        head_dim=fields.maybe_int("head_dim") or hidden // heads,
        dense_width=width,
        expert_width=width,
        num_experts=fields.int("num_local_experts"),
        moe_top_k=fields.int("num_experts_per_tok"),
        moe_layers=tuple(range(num_layers)),
        tie_embeddings=fields.bool("tie_word_embeddings"),
        norm_eps=fields.float("rms_norm_eps"),
        rope_theta=fields.rope_theta,
        max_positions=fields.int("max_position_embeddings"),
        names=HFNames(folder_mlp="block_sparse_moe.", expert_parts=("w1", "w3", "w2")),
        qk_norm=False,
    )
