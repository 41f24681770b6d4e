"""Tiny random checkpoints and a plain transformers forward to compare with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging as hf_logging

hf_logging.disable_progress_bar()

MakeFolder = Callable[..., Path]


def build_model(seed: int = 0, **changes: object) -> Qwen3MoeForCausalLM:
    """Large initial weights, so that routing and next tokens are far from uniform."""
    torch.manual_seed(seed)
    settings: dict[str, object] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
    }
    config = Qwen3MoeConfig(**(settings | changes))
    return Qwen3MoeForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture(scope="session")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> MakeFolder:
    """Checkpoint folders by their settings, written once."""
    made: dict[str, Path] = {}

    def make(seed: int = 0, **changes: object) -> Path:
        key = repr((seed, sorted(changes.items())))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("model")
            build_model(seed, **changes).save_pretrained(made[key])
        return made[key]

    return make


@pytest.fixture(scope="session")
def folder(make_folder: MakeFolder) -> Path:
    return make_folder()
