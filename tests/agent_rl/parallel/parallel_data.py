"""Two tiny policies of each family and one set of samples for all combinations.

Every token id is used once, so an id says which sample and position it is of, and every row is a
function of the id. 0 is the padding's id and no sample's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from agent_rl.types import TrainSample
from routing_cache import ArrayRows, RowLayout

LENGTHS = (9, 30, 5, 17, 1, 12, 23, 2, 14, 26, 3, 20)
VOCABULARY = 256
EXPERTS = 8
LAYERS = 4
MOE_LAYERS = (1, 2, 3)  # the first layer is dense
LAYOUT = RowLayout(num_hidden_layers=LAYERS, moe_layers=MOE_LAYERS, num_experts=8, moe_top_k=2)

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
    | {
        "num_key_value_heads": 4,
        "n_routed_experts": EXPERTS,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
}


def write_policy(folder: Path, family: str, *, transparent: bool = False) -> Path:
    """A random folder of ``family`` with a dense first layer.

    ``transparent``: no layer adds anything, so that every router sees its token's embedding.
    """
    from transformers import AutoModelForCausalLM
    from transformers.models.auto import CONFIG_MAPPING

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


def row_of(token: int) -> np.ndarray:
    """The experts ``[L, K]`` recorded for a token: another set for its neighbours and layers."""
    first = (3 * token + np.arange(len(MOE_LAYERS))) % EXPERTS
    return np.stack([first, (first + 1 + token // EXPERTS % (EXPERTS - 1)) % EXPERTS], axis=1)


def make_samples(
    lengths: tuple[int, ...] = LENGTHS, *, version: int = 0, missing_every: int = 0
) -> list[TrainSample]:
    """``missing_every`` n: the rows of every n-th token id are missing."""
    rng = np.random.default_rng(3)
    samples, used = [], 1
    for number, length in enumerate(lengths):
        ids = np.arange(used, used + length, dtype=np.int32)
        used += length
        mask = rng.random(length) < 0.6
        mask[-1], mask[0] = True, False
        rows = np.stack([row_of(int(t)) for t in ids[:-1]]) if length > 1 else np.zeros((0, 3, 2))
        samples.append(
            TrainSample(
                sample_id=f"sample-{number}",
                token_ids=ids,
                loss_mask=mask,
                rollout_logprobs=np.where(mask, -rng.exponential(4.0, length), 0).astype(
                    np.float32
                ),
                advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
                weight_versions=(version,),
                routed_experts=ArrayRows(
                    LAYOUT,
                    ids,
                    rows.astype(np.uint8),
                    ids[: len(rows)] % missing_every != 0 if missing_every else None,
                    weight_version=version,
                ),
            )
        )
    assert used <= VOCABULARY
    return samples
