"""Qwen3-MoE: grouped queries with a norm per head, softmax router, dense layers by list or step."""

from __future__ import annotations

from dataclasses import replace

from agent_rl.model.families.common import grouped_query, stepped_moe_layers
from agent_rl.model.families.fields import Fields
from agent_rl.model.shape import ModelShape, RouterRule


def shape(fields: Fields) -> ModelShape:
    fields.require("attention_bias", False)
    fields.require("use_sliding_window", False)
    common = grouped_query(
        fields,
        "qwen3_moe",
        moe_layers=stepped_moe_layers(fields),
        expert_width=fields.int("moe_intermediate_size"),
        num_experts=fields.int("num_experts", "num_local_experts"),
    )
    return replace(common, qk_norm=True, router=RouterRule(normalise=fields.bool("norm_topk_prob")))
