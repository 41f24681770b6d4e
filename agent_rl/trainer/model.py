"""From a Hugging Face Qwen3-MoE folder to a Megatron ``GPTModel``.

``ModelShape`` is what the trainer needs to know of ``config.json``; it refuses what the mapping
does not cover instead of training something slightly different.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from agent_rl.config import TrainerConfig
from agent_rl.errors import ConfigError
from agent_rl.trainer import cpu_backend
from agent_rl.trainer.layers import portable_block_spec
from routing_cache import RowLayout

# isort: split
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a Qwen3-MoE ``config.json`` that shape the model."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dense_width: int
    expert_width: int
    num_experts: int
    moe_top_k: int
    norm_topk_prob: bool
    moe_layers: tuple[int, ...]  # global 0-based numbers, ascending
    tie_embeddings: bool
    norm_eps: float
    rope_theta: float
    max_positions: int

    @property
    def row_layout(self) -> RowLayout:
        return RowLayout(
            num_hidden_layers=self.num_layers,
            moe_layers=self.moe_layers,
            num_experts=self.num_experts,
            moe_top_k=self.moe_top_k,
        )

    @classmethod
    def from_folder(cls, folder: Path) -> ModelShape:
        """Read ``folder/config.json``. Raises ``ConfigError`` naming what is not covered."""
        path = folder / "config.json"
        if not path.is_file():
            raise ConfigError(
                [f"policy.path: no config.json, got={folder} expected=a model folder"]
            )
        raw: dict[str, Any] = json.loads(path.read_text())
        problems = _uncovered(raw)
        if problems:
            raise ConfigError([f"{path}: {problem}" for problem in problems])
        num_layers = int(raw["num_hidden_layers"])
        step, dense = int(raw.get("decoder_sparse_step", 1)), set(raw.get("mlp_only_layers") or ())
        return cls(
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            num_layers=num_layers,
            num_heads=int(raw["num_attention_heads"]),
            num_kv_heads=int(raw["num_key_value_heads"]),
            head_dim=int(raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]),
            dense_width=int(raw["intermediate_size"]),
            expert_width=int(raw["moe_intermediate_size"]),
            num_experts=_num_experts(raw),
            moe_top_k=int(raw["num_experts_per_tok"]),
            norm_topk_prob=bool(raw.get("norm_topk_prob", False)),
            moe_layers=tuple(
                i for i in range(num_layers) if i not in dense and (i + 1) % step == 0
            ),
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            norm_eps=float(raw["rms_norm_eps"]),
            rope_theta=_rope_theta(raw),
            max_positions=int(raw["max_position_embeddings"]),
        )


def _num_experts(raw: Mapping[str, Any]) -> int:
    return int(raw.get("num_experts") or raw.get("num_local_experts") or 0)


def _rope_parameters(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """transformers 5 writes ``rope_parameters``, older folders ``rope_theta``/``rope_scaling``."""
    return raw.get("rope_parameters") or raw.get("rope_scaling") or {}


def _rope_theta(raw: Mapping[str, Any]) -> float:
    return float(_rope_parameters(raw).get("rope_theta") or raw.get("rope_theta") or 10000.0)


def _uncovered(raw: Mapping[str, Any]) -> list[str]:
    needed = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    needed += ("num_key_value_heads", "intermediate_size", "moe_intermediate_size")
    needed += ("num_experts_per_tok", "rms_norm_eps", "max_position_embeddings")
    problems = [f"{key}: missing" for key in needed if key not in raw]
    rope = _rope_parameters(raw)
    covered = (
        ("model_type", raw.get("model_type"), "qwen3_moe"),
        ("hidden_act", raw.get("hidden_act", "silu"), "silu"),
        ("attention_bias", raw.get("attention_bias", False), False),
        ("use_sliding_window", raw.get("use_sliding_window", False), False),
        ("rope_type", rope.get("rope_type", rope.get("type", "default")), "default"),
    )
    problems += [
        f"{key}: not covered, got={got!r} expected={expected!r}"
        for key, got, expected in covered
        if got != expected
    ]
    if not _num_experts(raw):
        problems.append("num_experts: missing")
    return problems


def transformer_config(shape: ModelShape, trainer: TrainerConfig) -> TransformerConfig:
    """Megatron's configuration of the model under the trainer's layout and precision.

    ``calculate_per_token_loss`` makes Megatron divide the summed gradient of all micro-batches
    and ranks by their total number of loss units, once, at the end of the mini-batch.
    """
    dtype = DTYPES[trainer.dtype]
    moe = set(shape.moe_layers)
    recompute: dict[str, Any] = {
        "none": {},
        "selective": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
        "full": {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    }[trainer.recompute]
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.dense_width,
        moe_ffn_hidden_size=shape.expert_width,
        num_moe_experts=shape.num_experts,
        moe_router_topk=shape.moe_top_k,
        moe_layer_freq=[int(i in moe) for i in range(shape.num_layers)],
        # softmax over the chosen logits is the normalised top-k of the full softmax
        moe_router_pre_softmax=not shape.norm_topk_prob,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=False,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=False,  # every weight is loaded
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        cuda_graph_scope=[],
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=trainer.dtype == "bfloat16",
        tensor_model_parallel_size=trainer.tensor_parallel,
        pipeline_model_parallel_size=trainer.pipeline_parallel,
        context_parallel_size=trainer.context_parallel,
        expert_model_parallel_size=trainer.expert_parallel,
        expert_tensor_parallel_size=1,
        sequence_parallel=trainer.sequence_parallel,
        **recompute,
    )


def build_model(shape: ModelShape, config: TransformerConfig) -> GPTModel:
    """This rank's part of the model, weights not yet loaded."""
    with cpu_backend.quiet():
        return GPTModel(
            config=config,
            transformer_layer_spec=portable_block_spec(config),  # type: ignore[arg-type]
            vocab_size=shape.vocab_size,
            max_sequence_length=shape.max_positions,
            position_embedding_type="rope",
            rotary_base=int(shape.rope_theta),
            share_embeddings_and_output_weights=shape.tie_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        )


def wrap_model(model: GPTModel, config: TransformerConfig) -> DistributedDataParallel:
    """Megatron's data-parallel wrapper, over its bf16 wrapper where the config asks for bf16."""
    inner = Float16Module(config, model) if config.bf16 else model
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return DistributedDataParallel(config, settings, inner)
