"""An SGLang plugin, run in each of its processes before the model is loaded."""
# pyright: reportMissingImports=false

from __future__ import annotations

import torch


def register() -> None:
    """Let the host-side cache of routing rows be plain memory.

    SGLang keeps captured expert ids in page-locked memory, which it registers with the CUDA
    driver. There is none on a CPU-only machine; with one, nothing is changed.
    """
    if torch.cuda.is_available():
        return
    from sglang.srt.mem_cache.pool_host import common

    def allocate_plain(
        dims: tuple[int, ...],
        dtype: torch.dtype,
        device: str,
        pin_memory: bool,
        allocator: object,
        registration_granularity_bytes: int | None = None,
    ) -> torch.Tensor:
        return torch.empty(dims, dtype=dtype, device="cpu")

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate_plain
