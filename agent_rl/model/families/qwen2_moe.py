"""Qwen2-MoE: biased queries, keys and values; a shared expert behind a gate of its own."""

from __future__ import annotations

from dataclasses import replace

from agent_rl.model.families.common import grouped_query, stepped_moe_layers
from agent_rl.model.families.fields import Fields
from agent_rl.model.shape import HFNames, ModelShape, RouterRule


def shape(fields: Fields) -> ModelShape:
    fields.require("use_sliding_window", False)
    common = grouped_query(
        fields,
        "qwen2_moe",
        moe_layers=stepped_moe_layers(fields),
        expert_width=fields.int("moe_intermediate_size"),
        num_experts=fields.int("num_experts"),
    )
    return replace(
        common,
        router=RouterRule(normalise=fields.bool("norm_topk_prob")),
        names=HFNames(shared="mlp.shared_expert."),
        qkv_bias=fields.bool("qkv_bias", default=True),
        shared_width=fields.int("shared_expert_intermediate_size"),
        shared_gate=True,
    )
