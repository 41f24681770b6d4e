"""Mixtral (arXiv 2401.04088, 2.1): experts in every layer, gates a softmax of the chosen logits."""

from __future__ import annotations

from dataclasses import replace

from agent_rl.model.families.common import grouped_query
from agent_rl.model.families.fields import Fields
from agent_rl.model.shape import HFNames, ModelShape


def shape(fields: Fields) -> ModelShape:
    fields.require("sliding_window", None)
    fields.require("router_jitter_noise", 0.0)
    common = grouped_query(
        fields,
        "mixtral",
        moe_layers=tuple(range(fields.int("num_hidden_layers"))),
        expert_width=fields.int("intermediate_size"),
        num_experts=fields.int("num_local_experts"),
    )
    names = HFNames(folder_mlp="block_sparse_moe.", expert_parts=("w1", "w3", "w2"))
    return replace(common, names=names)
