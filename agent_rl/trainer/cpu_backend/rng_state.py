"""The generator that recompute and dropout save and restore. All versions reach for CUDA's own."""

from __future__ import annotations

from megatron.core.tensor_parallel import random as megatron_random

from agent_rl.trainer.cpu_backend.patches import Patches
from agent_rl.trainer.cpu_backend.torch_stand_in import get_rng_state, set_rng_state


def apply(patches: Patches) -> None:
    """Have Megatron save and restore the CPU's generator."""
    patches.set(megatron_random, "_get_cuda_rng_state", get_rng_state)
    patches.set(megatron_random, "_set_cuda_rng_state", set_rng_state)
