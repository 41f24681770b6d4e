"""Tensors on the CPU that have to pass for CUDA ones, in the few functions that insist.

All versions: optimizers and gradient clipping sort parameters by comparing ``tensor.type()`` with
'torch.cuda.FloatTensor', tied embeddings and the positions of a context-parallel rank are moved
by ``tensor.cuda()``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.models.common.embeddings import (
    rope_utils,
    rotary_pos_embedding,
    yarn_rotary_pos_embedding,
)
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.optimizer import clip_grads, distrib_optimizer
from megatron.core.optimizer import optimizer as megatron_optimizer

from agent_rl.trainer.cpu_backend.patches import Patches

_ROPE = (rope_utils, rotary_pos_embedding, yarn_rotary_pos_embedding)
_WHERE = (
    ("clip_grad_by_total_norm_fp32", (clip_grads, megatron_optimizer)),
    ("get_pos_emb_on_this_cp_rank", _ROPE),
    ("setup_embeddings_and_output_layer", (LanguageModule,)),
    ("__init__", (megatron_optimizer.Float16OptimizerWithFloat16Params,)),
    ("__init__", (distrib_optimizer.DistributedOptimizer,)),
)


def apply(patches: Patches) -> None:
    """Wrap those functions, under every name that Megatron's modules have for them."""
    for name, owners in _WHERE:
        wrapped = _with_cuda_tensors(getattr(owners[0], name))
        for owner in owners:
            patches.set(owner, name, wrapped)


def _with_cuda_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _tensors_pass_for_cuda():
            return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def _tensors_pass_for_cuda() -> Iterator[None]:
    """Within: ``tensor.type()`` carries the CUDA prefix and ``tensor.cuda()`` is the tensor."""
    real_type, real_cuda = torch.Tensor.type, torch.Tensor.cuda

    def cuda_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = real_type(self, *args, **kwargs)
        if args or kwargs or not isinstance(name, str) or "cuda" in name:
            return name
        return name.replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = cuda_type  # type: ignore[method-assign]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.type = real_type  # type: ignore[method-assign]
        torch.Tensor.cuda = real_cuda  # type: ignore[method-assign]
