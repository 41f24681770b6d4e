"""DeepSeek-V3 (arXiv 2412.19437): latent attention, sigmoid router with a selection bias, groups.

The multi-token-prediction layer of a published folder (``model.layers.61`` and so on) is neither
built nor trained nor exported. The norms inside latent attention use ``rms_norm_eps``, as the
inference engines do; transformers has 1e-6 there whatever the configuration says.
"""

from __future__ import annotations

from agent_rl.model.families.common import (
    moe_layers_after_prefix,
    shared_width,
    sigmoid_router,
)
from agent_rl.model.families.fields import Fields
from agent_rl.model.shape import LatentAttention, ModelShape


def shape(fields: Fields) -> ModelShape:
    fields.require("hidden_act", "silu")
    fields.require("attention_bias", False)
    fields.require("rope_interleave", True)
    heads = fields.int("num_attention_heads")
    latent = LatentAttention(
        q_rank=fields.stated_int("q_lora_rank"),
        kv_rank=fields.int("kv_lora_rank"),
        nope_dim=fields.int("qk_nope_head_dim"),
        rope_dim=fields.int("qk_rope_head_dim"),
        v_dim=fields.int("v_head_dim"),
    )
    return ModelShape(
        family="deepseek_v3",
        vocab_size=fields.int("vocab_size"),
        hidden_size=fields.int("hidden_size"),
        num_layers=fields.int("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=latent.nope_dim + latent.rope_dim,
        dense_width=fields.int("intermediate_size"),
        expert_width=fields.int("moe_intermediate_size"),
        num_experts=fields.int("n_routed_experts", "num_local_experts"),
        moe_top_k=fields.int("num_experts_per_tok"),
        moe_layers=moe_layers_after_prefix(fields),
        tie_embeddings=fields.bool("tie_word_embeddings"),
        norm_eps=fields.float("rms_norm_eps"),
        rope_theta=fields.rope_theta,
        max_positions=fields.int("max_position_embeddings"),
        # Where they are absent, transformers takes the published model's 8, 4 and 2.5.
        router=sigmoid_router(fields, absent_is_one=False),
        qk_norm=False,
        latent=latent,
        yarn=fields.yarn(),
        shared_width=shared_width(fields),
    )
