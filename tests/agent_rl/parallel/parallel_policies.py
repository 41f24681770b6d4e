"""Two tiny policies of each family for all combinations; their sizes are those of the samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from deepseek_settings import LATENT_ATTENTION, YARN
from parallel_data import EXPERTS, LAYERS, VOCABULARY
from transformers import AutoModelForCausalLM
from transformers.models.auto import CONFIG_MAPPING

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
}
# By model_type. Qwen3-MoE shares key/value heads and ties its embeddings; DeepSeek-V3 has latent
# attention with YaRN, shared experts, and a router with a selection bias and groups.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": _COMMON
    | {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": EXPERTS,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0],
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "deepseek_v3": _COMMON
    | LATENT_ATTENTION
    | {
        "n_routed_experts": EXPERTS,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "rope_parameters": YARN,
    },
}


def write_policy(folder: Path, family: str, *, transparent: bool = False) -> Path:
    """A random folder of ``family`` with a dense first layer.

    ``transparent``: no layer adds anything, so that every router sees its token's embedding.
    """
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**FAMILIES[family]))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.3)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0) if transparent else parameter.normal_(1.0, 0.1)
            else:
                parameter.normal_(std=0.15)
            if transparent and ("o_proj" in name or "down_proj" in name):
                parameter.zero_()
    model.save_pretrained(folder)
    return folder
