"""Process groups: one place that turns a trainer layout into Megatron's parallel state."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from agent_rl.config import TrainerConfig
from agent_rl.errors import ConfigError
from agent_rl.trainer import cpu_backend

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
    model_parallel = config.tensor_parallel * config.pipeline_parallel * config.context_parallel
    if dist.get_world_size() % model_parallel:
        raise ConfigError(
            [
                f"trainer: {config.tensor_parallel} x {config.pipeline_parallel} x "
                f"{config.context_parallel} (tensor x pipeline x context) does not divide the "
                f"processes: got={dist.get_world_size()} expected=a multiple of {model_parallel}"
            ]
        )
    if parallel_state.model_parallel_is_initialized() and _layout() != _wanted(config):
        parallel_state.destroy_model_parallel()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor_parallel,
            pipeline_model_parallel_size=config.pipeline_parallel,
            context_parallel_size=config.context_parallel,
            expert_model_parallel_size=config.expert_parallel,
            expert_tensor_parallel_size=1,
        )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)


def _layout() -> tuple[int, int, int, int]:
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
    )


def _wanted(config: TrainerConfig) -> tuple[int, int, int, int]:
    return (
        config.tensor_parallel,
        config.pipeline_parallel,
        config.context_parallel,
        config.expert_parallel,
    )
