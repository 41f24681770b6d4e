"""A stand-in for the compiled ``sgl_kernel`` package, for SGLang on a plain CPU.

SGLang imports ``sgl_kernel`` in most of its modules, but its only CPU build needs AMX
instructions. This one holds the two functions that the CPU text path really calls and registers
no ``torch.ops.sgl_kernel`` operator: SGLang then reports that AMX is absent and takes its own
torch-native norm, rotary, attention and MoE code. Every other name exists, so that imports pass,
and raises when called: nothing is computed wrongly in silence.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import NoReturn, TypeVar

import torch

T = TypeVar("T")
__version__ = "0.0.0+cpu.shim"


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write newly allocated KV slots into each request's row of the slot table, in place.

    Args:
        req_pool_indices: ``[B]`` row of each request.
        req_to_token: ``[requests, pool_len]`` the table.
        start_offset, end_offset: ``[B]`` token range of each request.
        out_cache_loc: ``[sum(end - start)]`` the slots, request after request.
    """
    taken = 0
    for row, start, end in zip(
        req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True
    ):
        slots = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        taken += end - start


def weak_ref_tensor(tensor: T) -> T:
    """CUDA graphs borrow memory through this; without graphs the tensor itself will do."""
    return tensor


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} has no CPU stand-in: this model or server flag needs a GPU"
        )

    missing.__name__ = name
    return missing
