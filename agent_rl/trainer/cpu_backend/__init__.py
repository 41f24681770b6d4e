"""Megatron-core on a CPU with gloo; little where CUDA is present.

Every difference between Megatron there and here is one module, which says the versions that need
it (0.16.1 on Python 3.11, 0.19.2 on newer ones) and why. Each replaces attributes of Megatron's own
modules; torch, and with it every other library in the process, is left alone. What Megatron takes
from Transformer Engine is replaced in ``trainer/layers.py`` instead, by other layers. Router, token
dispatcher, linear layers, embedding, data parallelism, optimizer and schedules are Megatron's.

Import this package before any ``megatron.core`` module: it silences, once and only for the import,
the notes that Megatron prints about optional packages.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator

import torch

from agent_rl.trainer.cpu_backend.silence import quiet

# isort: split
from agent_rl.trainer.cpu_backend import (
    absent_te,
    chunk_order,
    cuda_tensors,
    rng_state,
    split_sizes,
    torch_stand_in,
    uncompiled,
)
from agent_rl.trainer.cpu_backend.patches import Patches

__all__ = ["install", "installed", "quiet", "uninstall"]

_patches = Patches()
_stand_in: types.ModuleType | None = None


def install() -> None:
    """Make Megatron-core usable on this machine. Idempotent; does little where CUDA is present.

    Call it again after importing further ``megatron.core`` modules: they are then covered too.
    """
    global _stand_in
    absent_te.apply(_patches)
    if torch.cuda.is_available():
        return
    if _stand_in is None:
        _stand_in = torch_stand_in.make()
        for difference in (rng_state, split_sizes, chunk_order, cuda_tensors):
            difference.apply(_patches)
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core"):
            if getattr(module, "torch", None) is torch:
                _patches.set(module, "torch", _stand_in)
            uncompiled.apply(module, _patches)


def uninstall() -> None:
    """Undo ``install``. Models that were built meanwhile stop working."""
    global _stand_in
    _patches.undo()
    _stand_in = None


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """``install`` for a block of code; restores what was before, also after an exception."""
    before = _stand_in is not None
    install()
    try:
        yield
    finally:
        if not before:
            uninstall()
