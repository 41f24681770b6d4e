"""From a model's shape to a Megatron ``GPTModel`` under the trainer's layout and precision."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from agent_rl.config.schema import TrainerConfig
from agent_rl.model.shape import ModelShape
from agent_rl.trainer import cpu_backend
from agent_rl.trainer.assignment import needs_equal_shapes
from agent_rl.trainer.layer_spec import block_spec, implementation

# isort: split
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import (
    MLATransformerConfig,
    TransformerConfig,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@cpu_backend.quiet()  # what CUDA graphs cover: the default warns of itself
def transformer_config(shape: ModelShape, trainer: TrainerConfig) -> TransformerConfig:
    """Megatron's configuration of the model under the trainer's layout and precision.

    ``calculate_per_token_loss`` makes Megatron divide the summed gradient of all micro-batches
    and ranks by their total number of loss units, once, at the end of the mini-batch.
    """
    dtype, layers = DTYPES[trainer.dtype], implementation(trainer.layer_spec)
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
    kind = TransformerConfig if shape.latent is None else MLATransformerConfig
    return kind(
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
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_token_dispatcher_type=trainer.token_dispatcher,
        transformer_impl=layers,
        moe_grouped_gemm=layers == "transformer_engine",
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        # Latent attention always has its two norms.
        qk_layernorm=shape.qk_norm or shape.latent is not None,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=False,  # every weight is loaded
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        calculate_per_token_loss=True,
        # Micro-batches have shapes of their own, which pipeline stages tell each other, unless
        # they are all laid out alike: see MicroBatcher.
        variable_seq_lengths=not needs_equal_shapes(trainer),
        # Two stages of an interleaved pipeline are each other's next and previous one: only the
        # unbatched exchange keeps activations and gradients apart.
        overlap_p2p_comm=trainer.virtual_pipeline > 1,
        batch_p2p_comm=trainer.virtual_pipeline == 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=trainer.dtype == "bfloat16",
        tensor_model_parallel_size=trainer.tensor_parallel,
        pipeline_model_parallel_size=trainer.pipeline_parallel,
        virtual_pipeline_model_parallel_size=(
            trainer.virtual_pipeline if trainer.virtual_pipeline > 1 else None
        ),
        context_parallel_size=trainer.context_parallel,
        expert_model_parallel_size=trainer.expert_parallel,
        expert_tensor_parallel_size=1,
        sequence_parallel=trainer.sequence_parallel,
        **_router_settings(shape),
        **_shared_settings(shape),
        **_latent_settings(shape),
        **recompute,
    )


def _router_settings(shape: ModelShape) -> dict[str, Any]:
    rule = shape.router
    limited = rule.topk_groups < rule.num_groups
    return {
        "moe_router_score_function": rule.score,
        # softmax over the chosen logits is the normalised top-k of the full softmax
        "moe_router_pre_softmax": rule.score == "softmax" and not rule.normalise,
        "moe_router_topk_scaling_factor": None if rule.scaling == 1.0 else rule.scaling,
        "moe_router_num_groups": rule.num_groups if limited else None,
        "moe_router_group_topk": rule.topk_groups if limited else None,
        "moe_router_enable_expert_bias": rule.selection_bias,
        # Megatron would move the bias after every optimizer step: it stays that of the policy,
        # which is what the engine was given.
        "moe_router_bias_update_rate": 0.0,
        "moe_router_fusion": False,  # the fused router takes no recorded experts
    }


def _shared_settings(shape: ModelShape) -> dict[str, Any]:
    if not shape.shared_width:
        return {}
    return {
        "moe_shared_expert_intermediate_size": shape.shared_width,
        "moe_shared_expert_gate": shape.shared_gate,
    }


def _latent_settings(shape: ModelShape) -> dict[str, Any]:
    latent, yarn = shape.latent, shape.yarn
    if latent is None:
        return {}
    settings: dict[str, Any] = {
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.nope_dim,
        "qk_pos_emb_head_dim": latent.rope_dim,
        "v_head_dim": latent.v_dim,
        "rope_type": "rope" if yarn is None else "yarn",
        "rotary_base": shape.rope_theta,
    }
    if yarn is None:
        return settings | {"rotary_scaling_factor": 1.0}
    return settings | {
        "rotary_scaling_factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_positions,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "mscale": yarn.mscale,
        "mscale_all_dim": yarn.mscale_all_dim,
    }


def build_chunks(shape: ModelShape, config: TransformerConfig) -> list[GPTModel]:
    """This rank's part of the model, several chunks where the pipeline is interleaved."""
    count = config.virtual_pipeline_model_parallel_size
    return [build_model(shape, config, stage) for stage in (range(count) if count else [None])]


def build_model(
    shape: ModelShape, config: TransformerConfig, vp_stage: int | None = None
) -> GPTModel:
    """One chunk of this rank's part of the model, weights not yet loaded."""
    place: Any = {"ignore_virtual": False, "vp_stage": vp_stage}
    with cpu_backend.quiet():
        return GPTModel(
            config=config,
            transformer_layer_spec=block_spec(config, vp_stage),  # type: ignore[arg-type]
            vocab_size=shape.vocab_size,
            max_sequence_length=shape.max_positions,
            position_embedding_type="rope",
            rotary_base=int(shape.rope_theta),
            rotary_percent=shape.rotary_fraction,
            share_embeddings_and_output_weights=shape.tie_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            vp_stage=vp_stage,
        )


def wrap_model(
    model: GPTModel, config: TransformerConfig, *, distributed_optimizer: bool = False
) -> DistributedDataParallel:
    """Megatron's data-parallel wrapper, over its bf16 wrapper where the config asks for bf16."""
    inner = _in_bfloat16(model, config) if config.bf16 else model
    _mark_experts(model)
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer
    )
    return DistributedDataParallel(config, settings, inner)


def _mark_experts(model: GPTModel) -> None:
    """Tell Megatron which ranks share an expert: those of the expert-data-parallel group.

    Megatron takes experts for dense weights unless expert parallelism is on, and of a
    tensor-parallel group counts only the first rank's in the gradient norm. Where tensor-parallel
    ranks hold whole experts, under sequence parallelism, each saw tokens of its own: gradients and
    then weights would drift apart, and with experts spread over those ranks some would be left
    out of the norm.
    """
    dense = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    tensor_parallel = parallel_state.get_tensor_model_parallel_world_size() > 1
    if dense == parallel_state.get_expert_data_parallel_world_size() and not tensor_parallel:
        return
    for layer in (module for module in model.modules() if isinstance(module, MoELayer)):
        experts: Any = layer.experts
        for parameter in experts.parameters():
            # Gradients go to the expert-data-parallel group; every rank's count in its norm.
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


def _in_bfloat16(model: GPTModel, config: TransformerConfig) -> Float16Module:
    """Megatron's bf16 wrapper; selection biases stay the float32 tensors that they are.

    Megatron rounds them with everything else and widens them again.
    """
    routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
    biases = [router.expert_bias for router in routers]
    wrapped = Float16Module(config, model)
    for router, bias in zip(routers, biases, strict=True):
        router.expert_bias = bias  # type: ignore[assignment]
    return wrapped
