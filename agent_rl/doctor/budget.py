"""The memory and disk that a run needs, from the model's shape and the configuration.

Trainer, per GPU:  parameters x (2 weights + 4 gradient + 12 / data parallel optimizer) bytes in
bfloat16: Megatron keeps gradients, a master copy and two moments in float32, and divides the last
three over the data-parallel ranks with the distributed optimizer. Activations come on top.
Engine, per GPU:   weights / tensor parallel, and keys and values per token.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent_rl.config.schema import RunConfig
from agent_rl.model.shape import ModelShape
from agent_rl.trainer.workers.world import num_processes

_OPTIMIZER_BYTES = 12  # master weight and two moments, float32
_GRADIENT_BYTES = 4
_WEIGHT_BYTES = {"bfloat16": 2, "float32": 4}
_LOGIT_COPIES = 3  # logits, their softmax and their gradient, float32


@dataclass(frozen=True)
class ModelSize:
    """Numbers of parameters. ``experts`` are divided over expert-parallel ranks, ``rest`` over
    tensor-parallel ones; both over pipeline stages."""

    experts: int
    rest: int

    @property
    def total(self) -> int:
        return self.experts + self.rest


@dataclass(frozen=True)
class Budget:
    """Bytes; ``_gpu`` is of the fullest one."""

    trainer_gpu: int  # weights, gradients and optimizer
    activations_gpu: int  # of one micro-batch: saved layer inputs and the last stage's logits
    engine_gpu: int  # weights
    kv_token_gpu: int  # keys and values of one token
    routing_token: int  # one row of expert ids
    routing_step: int  # all trajectories of a step at their longest
    weights: int  # the policy as a folder
    checkpoint: int  # weights and optimizer state


def model_size(shape: ModelShape) -> ModelSize:
    """Count the parameters: router, norms and biases included, latent attention left out."""
    hidden, heads = shape.hidden_size, shape.num_heads * shape.head_dim
    key_values = shape.num_kv_heads * shape.head_dim
    attention = 2 * hidden * heads + 2 * hidden * key_values
    norms = 2 * hidden + (2 * shape.head_dim if shape.qk_norm else 0)
    embeddings = shape.vocab_size * hidden * (1 if shape.tie_embeddings else 2)
    num_moe = len(shape.moe_layers)
    dense = (shape.num_layers - num_moe) * 3 * hidden * shape.dense_width
    routers = num_moe * hidden * (shape.num_experts + 3 * shape.shared_width)
    experts = num_moe * shape.num_experts * 3 * hidden * shape.expert_width
    rest = embeddings + hidden + shape.num_layers * (attention + norms) + dense + routers
    return ModelSize(experts=experts, rest=rest)


def budget(config: RunConfig, shape: ModelShape) -> Budget:
    """Compute what ``config`` needs for a model of ``shape``."""
    trainer, engine, size = config.trainer, config.engine, model_size(shape)
    weight = _WEIGHT_BYTES[trainer.dtype]
    world, stages = num_processes(trainer), trainer.pipeline_parallel
    rest = size.rest // (trainer.tensor_parallel * stages)
    experts = size.experts // (trainer.expert_parallel * stages)
    # Without the distributed optimizer every data-parallel rank keeps all of it.
    splits = trainer.distributed_optimizer
    data = world // (trainer.tensor_parallel * stages) if splits else 1
    expert_data = world // (trainer.expert_parallel * stages) if splits else 1
    state = _OPTIMIZER_BYTES if trainer.dtype == "bfloat16" else _OPTIMIZER_BYTES - 4
    held = rest * (weight + _GRADIENT_BYTES + state / data)
    held += experts * (weight + _GRADIENT_BYTES + state / expert_data)
    served = _WEIGHT_BYTES["float32" if engine.dtype == "float32" else "bfloat16"]
    layout = shape.row_layout
    row = layout.num_moe_layers * layout.moe_top_k * layout.dtype.itemsize
    algorithm = config.algorithm
    trajectories = algorithm.group_size * algorithm.groups_per_step
    heads = max(1, shape.num_kv_heads // engine.tensor_parallel)
    return Budget(
        trainer_gpu=int(held),
        activations_gpu=_activations(config, shape),
        engine_gpu=size.total * served // engine.tensor_parallel,
        kv_token_gpu=2 * shape.num_layers * heads * shape.head_dim * served,
        routing_token=row,
        routing_step=trajectories * config.agent.max_tokens * row,
        weights=size.total * weight,
        checkpoint=size.total * (weight + state),
    )


def _activations(config: RunConfig, shape: ModelShape) -> int:
    """Full recompute keeps the input of every layer, for as many micro-batches as there are
    stages; without it a layer keeps about 34 bytes per token and channel (arXiv 2205.05198, eq. 2,
    attention scores recomputed), experts counted as one dense layer of their active width."""
    trainer = config.trainer
    tokens = trainer.micro_batch_tokens // trainer.context_parallel
    weight = _WEIGHT_BYTES[trainer.dtype]
    layer = shape.hidden_size * (weight if trainer.recompute == "full" else 17 * weight)
    split = trainer.tensor_parallel if trainer.sequence_parallel else 1
    kept = tokens * layer * shape.num_layers // split  # a stage's share, times its micro-batches
    logits = _LOGIT_COPIES * 4 * tokens * shape.vocab_size // trainer.tensor_parallel
    return kept + logits
