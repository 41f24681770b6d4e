"""Shapes of published models, so that needs can be told before anything is downloaded."""

from __future__ import annotations

from agent_rl.model.shape import ModelShape

# From the models' own config.json.
KNOWN_MODELS: dict[str, ModelShape] = {
    "Qwen/Qwen3-30B-A3B": ModelShape(
        vocab_size=151_936,
        hidden_size=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        dense_width=6144,
        expert_width=768,
        num_experts=128,
        moe_top_k=8,
        moe_layers=tuple(range(48)),
        tie_embeddings=False,
        norm_eps=1e-6,
        rope_theta=1e6,
        max_positions=40_960,
    )
}
