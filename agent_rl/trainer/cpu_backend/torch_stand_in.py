"""The name ``torch`` in Megatron's modules: ``device="cuda"`` and ``torch.cuda`` are the CPU.

All versions ask for the current device, streams, events and RNG states, and create tensors there.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any

import torch

_CPU = torch.device("cpu")
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint")


def make() -> types.ModuleType:
    """``torch`` as Megatron is to see it; everything else in it is torch's own."""
    module = types.ModuleType("torch")
    module.__dict__.update({name: _on_cpu(getattr(torch, name)) for name in _FACTORIES})
    module.__dict__["cuda"] = _cuda_module()
    module.__dict__["__getattr__"] = lambda name: getattr(torch, name)
    return module


def get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the CPU generator's state, for whichever device."""
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """Set the CPU generator's state, for whichever device."""
    torch.set_rng_state(state)


class _Inert:
    """A CUDA stream or event on a device that runs everything in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> _Inert:
        return self

    def __exit__(self, *args: Any) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Inert) -> float:
        return 0.0

    def record_event(self, event: Any = None) -> _Inert:
        return _Inert()

    def _nothing(self, *args: Any, **kwargs: Any) -> None: ...

    synchronize = wait_stream = wait_event = wait = record = _nothing


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)  # pinning needs a CUDA context
        return factory(*args, **kwargs)

    return create


def _cuda_module() -> types.ModuleType:
    overrides: dict[str, Any] = {
        "current_device": lambda: _CPU,
        "current_stream": lambda *args: _Inert(),
        "default_stream": lambda *args: _Inert(),
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda *args, **kwargs: None,
        "empty_cache": lambda: None,
        "is_available": lambda: False,
        "manual_seed": torch.manual_seed,
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "Stream": _Inert,
        "Event": _Inert,
        "FloatTensor": torch.FloatTensor,
        "HalfTensor": torch.HalfTensor,
        "BFloat16Tensor": torch.BFloat16Tensor,
    }
    module = types.ModuleType("torch.cuda")
    module.__dict__.update(overrides)
    module.__dict__["__getattr__"] = lambda name: getattr(torch.cuda, name)
    return module
