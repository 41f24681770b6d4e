"""Chunks of tokens that lie in order already, as with one expert-parallel rank.

All versions copy them nonetheless, twice per layer in each direction: about a tenth of a training
step on a CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe import token_dispatcher

from agent_rl.trainer.cpu_backend.patches import Patches


def apply(patches: Patches) -> None:
    """Have the dispatcher sort chunks only where that moves any."""
    sort_chunks = _skip_identity(token_dispatcher.sort_chunks_by_idxs)
    patches.set(token_dispatcher, "sort_chunks_by_idxs", sort_chunks)


def _skip_identity(sort_chunks: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(sort_chunks)
    def call(tokens: Any, split_sizes: Any, sorted_idxs: Any, probs: Any = None, **kwargs: Any):
        if torch.equal(sorted_idxs, torch.arange(sorted_idxs.numel(), device=sorted_idxs.device)):
            return tokens, probs
        return sort_chunks(tokens, split_sizes, sorted_idxs, probs=probs, **kwargs)

    return call
