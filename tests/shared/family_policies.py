"""A tiny random policy of every covered family, as transformers writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from deepseek_settings import LATENT_ATTENTION, YARN
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto import CONFIG_MAPPING

_COMMON: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_QWEN = _COMMON | {
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}
_DEEPSEEK = (
    _COMMON
    | LATENT_ATTENTION
    | {
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
    }
)
_GLM = _COMMON | {
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "head_dim": 16,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "attention_bias": True,
    "use_qk_norm": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}

# name -> (model_type, settings)
FAMILY_POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", _QWEN | {"head_dim": 16}),
    "qwen3_moe, dense by list": (
        "qwen3_moe",
        _QWEN | {"head_dim": 16, "num_hidden_layers": 4, "mlp_only_layers": [0, 2]},
    ),
    "qwen3_moe, dense by step": (
        "qwen3_moe",
        _QWEN | {"head_dim": 16, "num_hidden_layers": 4, "decoder_sparse_step": 2},
    ),
    "qwen2_moe": (
        "qwen2_moe",
        _QWEN | {"norm_topk_prob": False, "shared_expert_intermediate_size": 48, "qkv_bias": True},
    ),
    "mixtral": (
        "mixtral",
        _COMMON | {"intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "deepseek_v3": ("deepseek_v3", _DEEPSEEK),
    "deepseek_v3, yarn": ("deepseek_v3", _DEEPSEEK | {"rope_parameters": YARN}),
    "deepseek_v3, plain queries": (
        "deepseek_v3",
        _DEEPSEEK
        | {"q_lora_rank": None, "first_k_dense_replace": 2, "n_shared_experts": 2, "n_group": 1}
        | {"topk_group": 1},
    ),
    "glm4_moe": ("glm4_moe", _GLM),
}


def write_family(folder: Path, name: str, *, seed: int = 0, **overrides: Any) -> Path:
    """A random policy folder; weights wide enough, and biases uneven enough, to route unevenly."""
    kind, settings = FAMILY_POLICIES[name]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**(settings | overrides)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
            else:
                parameter.normal_(mean=1.0, std=0.1)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.3)
    model.save_pretrained(folder)
    return folder


def load(folder: Path) -> PreTrainedModel:
    """The folder as transformers reads it, in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
