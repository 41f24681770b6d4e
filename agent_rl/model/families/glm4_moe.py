"""GLM-4.5 and later (``glm4_moe``): DeepSeek-V3's router over grouped-query attention.

The multi-token-prediction layer of a published folder is neither built nor trained nor exported.
"""

from __future__ import annotations

from dataclasses import replace

from agent_rl.model.families.common import (
    grouped_query,
    moe_layers_after_prefix,
    shared_width,
    sigmoid_router,
)
from agent_rl.model.families.fields import Fields
from agent_rl.model.shape import ModelShape


def shape(fields: Fields) -> ModelShape:
    common = grouped_query(
        fields,
        "glm4_moe",
        moe_layers=moe_layers_after_prefix(fields),
        expert_width=fields.int("moe_intermediate_size"),
        num_experts=fields.int("n_routed_experts", "num_local_experts"),
    )
    return replace(
        common,
        router=sigmoid_router(fields),
        qk_norm=fields.bool("use_qk_norm"),
        qkv_bias=fields.bool("attention_bias"),
        rotary_fraction=fields.rotary_fraction,
        shared_width=shared_width(fields),
    )
