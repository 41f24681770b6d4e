"""Split sizes of the all-to-all dispatcher: wanted as numpy, made so of CUDA tensors only.

All versions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe import moe_utils, token_dispatcher

from agent_rl.trainer.cpu_backend.patches import Patches


def apply(patches: Patches) -> None:
    """Have split sizes on the CPU turned into numpy arrays as well."""
    move = _to_numpy(moe_utils.maybe_move_tensor_to_cpu)
    for module in (moe_utils, token_dispatcher):
        patches.set(module, "maybe_move_tensor_to_cpu", move)


def _to_numpy(move: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(move)
    def call(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if torch.is_tensor(tensor) and not tensor.is_cuda:
            return tensor.numpy() if as_numpy else tensor
        return move(tensor, as_numpy, record_stream)

    return call
