"""GLM-4.5 and later (``glm4_moe``): DeepSeek-V3's router over grouped-query attention.

The multi-token-prediction layer of a published folder is neither built nor trained nor exported.
"""

from __future__ import annotations

from agent_rl.trainer.families.deepseek_v3 import sigmoid_router
from agent_rl.trainer.families.fields import Fields
from agent_rl.trainer.shape import ModelShape


def shape(fields: Fields) -> ModelShape:
    fields.require("hidden_act", "silu")
    fields.require_plain_rope()
    hidden, heads = fields.int("hidden_size"), fields.int("num_attention_heads")
    num_layers, expert_width = fields.int("num_hidden_layers"), fields.int("moe_intermediate_size")
    return ModelShape(
        family="glm4_moe",
        vocab_size=fields.int("vocab_size"),
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=fields.int("num_key_value_heads"),
        head_dim=fields.maybe_int("head_dim") or hidden // heads,
        dense_width=fields.int("intermediate_size"),
        expert_width=expert_width,
        num_experts=fields.int("n_routed_experts", "num_local_experts"),
        moe_top_k=fields.int("num_experts_per_tok"),
        moe_layers=tuple(range(fields.maybe_int("first_k_dense_replace") or 0, num_layers)),
        tie_embeddings=fields.bool("tie_word_embeddings"),
        norm_eps=fields.float("rms_norm_eps"),
        rope_theta=fields.rope_theta,
        max_positions=fields.int("max_position_embeddings"),
        router=sigmoid_router(fields),
        qk_norm=fields.bool("use_qk_norm"),
        qkv_bias=fields.bool("attention_bias"),
        rotary_fraction=fields.rotary_fraction,
        shared_width=expert_width * (fields.maybe_int("n_shared_experts") or 0),
    )
