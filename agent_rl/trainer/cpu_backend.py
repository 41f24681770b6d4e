"""Everything that lets Megatron-core 0.16.1 train on CPU with gloo; nothing where CUDA is present.

Megatron asks ``torch.cuda`` for the current device, streams, events and RNG states, creates
tensors with ``device="cuda"`` and compares ``tensor.type()`` with CUDA type names. ``install``
gives Megatron's own modules a stand-in for their global name ``torch``; the real torch module,
and with it every other library in the process, is left alone.

The layer spec below replaces what Megatron takes from Transformer Engine: a norm that marks its
weight for sequence parallelism, an attention core on ``scaled_dot_product_attention`` (padded,
packed and context-parallel inputs) and experts on one grouped matrix product. Router, token
dispatcher, linear layers, embedding, data parallelism, optimizer and schedules are Megatron's.

Import this module before any ``megatron.core`` one: it silences, once and only for the import,
the notes that Megatron prints about optional packages.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.distributed
    import megatron.core.extensions.transformer_engine as te_extension
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer.distrib_optimizer as distrib_optimizer
    import megatron.core.optimizer_param_scheduler
    import megatron.core.pipeline_parallel.schedules  # noqa: F401
    from megatron.core.models.common.embeddings import (
        rope_utils,
        rotary_pos_embedding,
        yarn_rotary_pos_embedding,
    )
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.optimizer import clip_grads
    from megatron.core.optimizer import optimizer as megatron_optimizer
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

_CPU = torch.device("cpu")
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint")


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


def _get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


def _cpu_cuda_module() -> types.ModuleType:
    """``torch.cuda`` as seen by Megatron: the CPU is the current device, streams are inert."""
    overrides: dict[str, Any] = {
        "current_device": lambda: _CPU,
        "current_stream": lambda *args: _Inert(),
        "default_stream": lambda *args: _Inert(),
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda *args, **kwargs: None,
        "empty_cache": lambda: None,
        "is_available": lambda: False,
        "manual_seed": torch.manual_seed,
        "get_rng_state": _get_rng_state,
        "set_rng_state": _set_rng_state,
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


def _cpu_torch_module() -> types.ModuleType:
    """``torch`` as seen by Megatron: ``device="cuda"`` means the CPU."""

    def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(factory)
        def create(*args: Any, **kwargs: Any) -> Any:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = _CPU
            kwargs.pop("pin_memory", None)  # pinning needs a CUDA context
            return factory(*args, **kwargs)

        return create

    module = types.ModuleType("torch")
    module.__dict__.update({name: on_cpu(getattr(torch, name)) for name in _FACTORIES})
    module.__dict__["cuda"] = _cpu_cuda_module()
    module.__dict__["__getattr__"] = lambda name: getattr(torch, name)
    return module


@contextlib.contextmanager
def _tensors_pass_for_cuda() -> Iterator[None]:
    """Within: ``tensor.type()`` carries the CUDA prefix and ``tensor.cuda()`` is the tensor.

    Optimizers and gradient clipping sort parameters by comparing with 'torch.cuda.FloatTensor'.
    """
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


def _with_cuda_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _tensors_pass_for_cuda():
            return function(*args, **kwargs)

    return call


def _splits_to_numpy(move: Callable[..., Any]) -> Callable[..., Any]:
    """The all-to-all dispatcher wants numpy split sizes; upstream converts CUDA tensors only."""

    @functools.wraps(move)
    def call(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if torch.is_tensor(tensor) and not tensor.is_cuda:
            return tensor.numpy() if as_numpy else tensor
        return move(tensor, as_numpy, record_stream)

    return call


def _skip_identity_sort(sort_chunks: Callable[..., Any]) -> Callable[..., Any]:
    """With one expert-parallel rank chunks are in order already: upstream copies them anyway.

    Twice a layer in each direction; about a tenth of a CPU training step.
    """

    @functools.wraps(sort_chunks)
    def call(tokens: Any, split_sizes: Any, sorted_idxs: Any, probs: Any = None, **kwargs: Any):
        if torch.equal(sorted_idxs, torch.arange(sorted_idxs.numel(), device=sorted_idxs.device)):
            return tokens, probs
        return sort_chunks(tokens, split_sizes, sorted_idxs, probs=probs, **kwargs)

    return call


_ABSENT = object()


class _Patches:
    """Attributes replaced, in order, so that ``uninstall`` can put them back."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        self._replaced.append((owner, name, owner.__dict__.get(name, _ABSENT)))
        setattr(owner, name, value)

    def undo(self) -> None:
        for owner, name, value in reversed(self._replaced):
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        self._replaced.clear()


_patches = _Patches()
_proxy: types.ModuleType | None = None


def install() -> None:
    """Make Megatron-core usable on this machine. Idempotent; does nothing where CUDA is present.

    Call it again after importing further ``megatron.core`` modules: they are then covered too.
    """
    global _proxy
    if not hasattr(moe_utils, "te_general_gemm"):
        # 0.16.1 reads this name in the router's gating even without Transformer Engine.
        _patches.set(moe_utils, "te_general_gemm", None)
    if not te_extension.HAVE_TE and multi_latent_attention.HAVE_TE:
        # 0.16.1 stands a mock in for Transformer Engine and takes it for the real one here.
        _patches.set(multi_latent_attention, "HAVE_TE", False)
    if torch.cuda.is_available():
        return
    if _proxy is None:
        _proxy = _cpu_torch_module()
        _patch_functions()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            _patches.set(module, "torch", _proxy)
        if name.startswith("megatron.core"):
            _run_uncompiled(module)


def uninstall() -> None:
    """Undo ``install``. Models that were built meanwhile stop working."""
    global _proxy
    _patches.undo()
    _proxy = None


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """``install`` for a block of code; restores what was before, also after an exception."""
    before = _proxy is not None
    install()
    try:
        yield
    finally:
        if not before:
            uninstall()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within: no warnings from Megatron's modules about its own internal calls."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.")
        # Where torch reports that Megatron calls a collective by its old name.
        warnings.filterwarnings("ignore", module=r"torch\.distributed\.c10d_logger")
        yield


def _run_uncompiled(module: types.ModuleType) -> None:
    """Take torch.compile off the functions and methods of a module.

    It fuses a few operations for a GPU. Here it would call a C++ compiler in the middle of a step,
    and fail where there is none or where the environment's path has a space in it.
    """
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    for owner in (module, *(c for c in classes if c.__module__ == module.__name__)):
        for name, value in list(vars(owner).items()):
            if isinstance(value, types.FunctionType):  # not the mocks of absent packages
                original = getattr(value, "_torchdynamo_orig_callable", None)
                if original is not None:
                    _patches.set(owner, name, original)


def _patch_functions() -> None:
    _patches.set(megatron_random, "_get_cuda_rng_state", _get_rng_state)
    _patches.set(megatron_random, "_set_cuda_rng_state", _set_rng_state)
    move = _splits_to_numpy(moe_utils.maybe_move_tensor_to_cpu)
    _patches.set(moe_utils, "maybe_move_tensor_to_cpu", move)
    _patches.set(token_dispatcher, "maybe_move_tensor_to_cpu", move)
    sort_chunks = _skip_identity_sort(token_dispatcher.sort_chunks_by_idxs)
    _patches.set(token_dispatcher, "sort_chunks_by_idxs", sort_chunks)
    clip = _with_cuda_tensors(clip_grads.clip_grad_by_total_norm_fp32)
    for module in (clip_grads, megatron_optimizer, distrib_optimizer):
        if hasattr(module, "clip_grad_by_total_norm_fp32"):
            _patches.set(module, "clip_grad_by_total_norm_fp32", clip)
    for owner, name in (
        (megatron_optimizer.Float16OptimizerWithFloat16Params, "__init__"),
        (distrib_optimizer.DistributedOptimizer, "__init__"),
        (LanguageModule, "setup_embeddings_and_output_layer"),
    ):
        _patches.set(owner, name, _with_cuda_tensors(getattr(owner, name)))
    slice_positions = _with_cuda_tensors(rope_utils.get_pos_emb_on_this_cp_rank)
    for module in (rope_utils, rotary_pos_embedding, yarn_rotary_pos_embedding):
        _patches.set(module, "get_pos_emb_on_this_cp_rank", slice_positions)
