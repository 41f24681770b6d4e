"""Process groups: one place that turns a trainer layout into Megatron's parallel state."""

from __future__ import annotations

import math
import os

import torch
import torch.distributed as dist

from agent_rl.config.schema import TrainerConfig
from agent_rl.errors import ConfigError
from agent_rl.trainer import cpu_backend
from agent_rl.trainer.grid import Part

# isort: split
from megatron.core import parallel_state, tensor_parallel


def initialize(config: TrainerConfig, *, seed: int) -> None:
    """Start torch.distributed if need be and build Megatron's groups for ``config``'s layout.

    A single process needs no rendezvous and opens no port; under ``torchrun`` the environment
    decides. Called again with the same layout it changes nothing but the seed.

    Raises ``ConfigError`` when the layout does not divide the number of processes.
    """
    cpu_backend.install()
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    _check_world(config, dist.get_world_size())
    if parallel_state.model_parallel_is_initialized() and _layout() != _wanted(config):
        parallel_state.destroy_model_parallel()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor_parallel,
            pipeline_model_parallel_size=config.pipeline_parallel,
            virtual_pipeline_model_parallel_size=_virtual(config),
            context_parallel_size=config.context_parallel,
            expert_model_parallel_size=config.expert_parallel,
            expert_tensor_parallel_size=1,
            distributed_timeout_minutes=math.ceil(config.worker_timeout_s / 60),
        )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)


def own_part(config: TrainerConfig) -> Part:
    """Return the part of every micro-batch that this rank holds."""
    sequence = config.sequence_parallel
    return Part(
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=parallel_state.get_context_parallel_world_size(),
        sp_rank=parallel_state.get_tensor_model_parallel_rank() if sequence else 0,
        sp_size=parallel_state.get_tensor_model_parallel_world_size() if sequence else 1,
    )


def reports_outputs() -> bool:
    """Tell whether this rank speaks for its part of the logits.

    Only the last pipeline stage has them; of a tensor-parallel group, whose ranks compute the same
    values, the first does. Every sampled token is then reported by exactly one rank.
    """
    return (
        parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        and parallel_state.get_tensor_model_parallel_rank() == 0
    )


def sum_over_context(values: torch.Tensor) -> torch.Tensor:
    """Sum over the context-parallel ranks, each of which holds a part of every sequence.

    Without a gradient. All of them have to call it, also those without a token in this micro-batch.
    """
    if parallel_state.get_context_parallel_world_size() == 1:
        return values
    out = values.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=parallel_state.get_context_parallel_group())
    return out


def _check_world(config: TrainerConfig, world: int) -> None:
    model_parallel = config.tensor_parallel * config.pipeline_parallel * config.context_parallel
    if world % model_parallel:
        raise ConfigError(
            [
                f"trainer: {config.tensor_parallel} x {config.pipeline_parallel} x "
                f"{config.context_parallel} (tensor x pipeline x context) does not divide the "
                f"processes: got={world} expected=a multiple of {model_parallel}"
            ]
        )
    stage = world // config.pipeline_parallel
    if stage % config.expert_parallel:
        raise ConfigError(
            [
                f"trainer.expert_parallel: {config.expert_parallel} does not divide the processes "
                f"of a pipeline stage: got={stage} expected=a multiple of {config.expert_parallel}"
            ]
        )


def _virtual(config: TrainerConfig) -> int | None:
    return config.virtual_pipeline if config.virtual_pipeline > 1 else None


def _layout() -> tuple[int | None, ...]:
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
    )


def _wanted(config: TrainerConfig) -> tuple[int | None, ...]:
    return (
        config.tensor_parallel,
        config.pipeline_parallel,
        _virtual(config),
        config.context_parallel,
        config.expert_parallel,
    )
