"""Parts that several families' configurations share."""

from __future__ import annotations

from agent_rl.model.families.fields import Fields
from agent_rl.model.shape import ModelShape, RouterRule


def grouped_query(
    fields: Fields,
    family: str,
    *,
    moe_layers: tuple[int, ...],
    expert_width: int,
    num_experts: int,
) -> ModelShape:
    """Return a model of grouped-query attention; a family replaces what it does otherwise."""
    fields.require("hidden_act", "silu")
    fields.require_plain_rope()
    hidden, heads = fields.int("hidden_size"), fields.int("num_attention_heads")
    return ModelShape(
        family=family,
        vocab_size=fields.int("vocab_size"),
        hidden_size=hidden,
        num_layers=fields.int("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=fields.int("num_key_value_heads"),
        head_dim=fields.maybe_int("head_dim") or hidden // heads,
        dense_width=fields.int("intermediate_size"),
        expert_width=expert_width,
        num_experts=num_experts,
        moe_top_k=fields.int("num_experts_per_tok"),
        moe_layers=moe_layers,
        tie_embeddings=fields.bool("tie_word_embeddings"),
        norm_eps=fields.float("rms_norm_eps"),
        rope_theta=fields.rope_theta,
        max_positions=fields.int("max_position_embeddings"),
        qk_norm=False,
    )


def stepped_moe_layers(fields: Fields) -> tuple[int, ...]:
    """Return every ``decoder_sparse_step``-th layer, without ``mlp_only_layers`` (Qwen)."""
    step, dense = fields.maybe_int("decoder_sparse_step") or 1, fields.ints("mlp_only_layers")
    count = fields.int("num_hidden_layers")
    return tuple(i for i in range(count) if i not in dense and (i + 1) % step == 0)


def moe_layers_after_prefix(fields: Fields) -> tuple[int, ...]:
    """Return all but the ``first_k_dense_replace`` first layers (DeepSeek)."""
    fields.require("moe_layer_freq", 1)  # servers heed it, transformers does not
    prefix = fields.stated_int("first_k_dense_replace") or 0
    return tuple(range(prefix, fields.int("num_hidden_layers")))


def shared_width(fields: Fields) -> int:
    """Return the width of all shared experts together, 0 without any (DeepSeek)."""
    return fields.int("moe_intermediate_size") * (fields.stated_int("n_shared_experts") or 0)


def sigmoid_router(fields: Fields, *, absent_is_one: bool = True) -> RouterRule:
    """Return the rule that DeepSeek-V3 and GLM-4.5 share (arXiv 2412.19437, 2.1.2, eq. 13 to 16).

    Scores are sigmoids, the choice adds a bias to them, the gates are the chosen scores over their
    sum, times a factor. With ``absent_is_one`` the numbers of groups and the factor are 1 where the
    configuration lacks them; without it they must be there.
    """
    fields.require("norm_topk_prob", True)
    fields.require("scoring_func", "sigmoid")
    fields.require("topk_method", "noaux_tc")
    if absent_is_one:
        groups, chosen = fields.maybe_int("n_group") or 1, fields.maybe_int("topk_group") or 1
    else:
        groups, chosen = fields.int("n_group"), fields.int("topk_group")
    top_k = fields.int("num_experts_per_tok")
    # Megatron leaves the gate of a single expert as it is; divided by itself it would be 1.
    if fields.maybe_int("num_experts_per_tok") == 1:
        fields.not_covered.append("num_experts_per_tok: not covered, got=1 expected=2 or more")
    # A group is ranked by its two best experts; Megatron ranks it by its (top_k / groups) best.
    if chosen < groups and top_k // chosen != 2:
        fields.not_covered.append(
            f"topk_group: not covered, got={chosen} expected=half of num_experts_per_tok ({top_k})"
        )
    return RouterRule(
        score="sigmoid",
        scaling=fields.float("routed_scaling_factor", 1.0 if absent_is_one else None),
        selection_bias=True,
        num_groups=groups if chosen < groups else 1,
        topk_groups=chosen if chosen < groups else 1,
    )
