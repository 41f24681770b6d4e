"""Weights between Hugging Face names and this rank's Megatron parameters, both ways, bit-exact.

One ``ParamMap`` says which Hugging Face tensors one or several parameters of this rank are made
of, along which of their axes a process group shares them out, and how this rank's part of them is
arranged in the parameters. The same map carries gradients, Adam moments and master weights, which
have the parameters' shapes: a checkpoint by Hugging Face name does not depend on the layout that
wrote it. ``param_maps`` makes the maps of a model.

Names are transformers' own (``named_parameters()`` and persistent buffers), experts fused
(``mlp.experts.gate_up_proj [E, 2I, H]``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from agent_rl.errors import ConfigError
from agent_rl.trainer import cpu_backend  # noqa: F401  # before megatron: quiet import

# isort: split
from megatron.core import parallel_state

Tensors = Mapping[str, torch.Tensor]
Group = Any  # torch.distributed.ProcessGroup
Parts = Sequence[torch.Tensor]


class TensorSource(Protocol):
    """Hugging Face tensors of which a rank reads only its own part."""

    def __contains__(self, name: str) -> bool: ...

    def part(self, name: str, axis: int, index: int, count: int) -> torch.Tensor:
        """The ``index``-th of ``count`` equal parts along ``axis``."""
        ...


class TensorsInMemory:
    """A ``TensorSource`` over whole tensors."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def part(self, name: str, axis: int, index: int, count: int) -> torch.Tensor:
        return self._tensors[name].chunk(count, dim=axis)[index]


@dataclass(frozen=True)
class Slice:
    """A rank's part of one Hugging Face tensor: its position along ``axis`` in equal parts."""

    name: str
    axis: int
    index: int
    count: int


@dataclass(frozen=True)
class ParamMap:
    """Parameters (or a buffer) of this rank and the Hugging Face tensors they are made of.

    Every rank of ``group`` holds one of equal parts of each of ``hf_names`` along ``axis``; without
    a group every rank holds them whole. ``to_local`` arranges such parts as the parameters,
    ``to_parts`` is its inverse.
    """

    parameters: tuple[torch.Tensor, ...]
    hf_names: tuple[str, ...]
    axis: int = 0
    group: Group | None = None
    to_local: Callable[[Parts], list[torch.Tensor]] = list
    to_parts: Callable[[Parts], list[torch.Tensor]] = list
    trained: bool = True  # False: a buffer, without gradient or optimizer state

    @property
    def slices(self) -> tuple[Slice, ...]:
        """This rank's parts, in the order of ``hf_names``."""
        index, count = (0, 1) if self.group is None else (self.group.rank(), self.group.size())
        return tuple(Slice(name, self.axis, index, count) for name in self.hf_names)

    def read(self, source: TensorSource) -> list[torch.Tensor]:
        """Return what the parameters should hold, from Hugging Face tensors."""
        parts = [source.part(s.name, s.axis, s.index, s.count) for s in self.slices]
        return self.to_local(parts)

    def gather(self, local: Parts) -> dict[str, torch.Tensor]:
        """Whole Hugging Face tensors from every rank's ``local``. Collective over ``group``."""
        if self.group is None or self.group.size() == 1:
            whole = self.to_parts(local)
        else:
            ranks: list[list[torch.Tensor]] = [[] for _ in range(self.group.size())]
            for tensor in local:
                shards = [torch.empty_like(tensor) for _ in ranks]
                dist.all_gather(shards, tensor.contiguous(), group=self.group)
                for rank, shard in zip(ranks, shards, strict=True):
                    rank.append(shard)
            parts = [self.to_parts(rank) for rank in ranks]
            whole = [torch.cat(column, dim=self.axis) for column in zip(*parts, strict=True)]
        return dict(zip(self.hf_names, whole, strict=True))


@torch.no_grad()
def load_weights(maps: Sequence[ParamMap], tensors: Tensors | TensorSource) -> None:
    """Copy Hugging Face tensors into the parameters.

    Raises ``ConfigError`` naming every missing tensor and every shape that does not fit.
    """
    source = TensorsInMemory(tensors) if isinstance(tensors, Mapping) else tensors
    problems = []
    for m in maps:
        missing = [name for name in m.hf_names if name not in source]
        if missing:
            problems += [f"weights: {name} is missing" for name in missing]
            continue
        try:
            values = m.read(source)
        except (RuntimeError, IndexError) as error:
            problems.append(f"weights: {m.hf_names[0]} does not fit ({error})")
            continue
        for value, parameter in zip(values, m.parameters, strict=True):
            if value.shape != parameter.shape:
                got, expected = tuple(value.shape), tuple(parameter.shape)
                problems.append(f"weights: {m.hf_names[0]} does not fit, {got=} {expected=}")
                continue
            parameter.copy_(value)
    if problems:
        raise ConfigError(problems)


@torch.no_grad()
def export_weights(maps: Sequence[ParamMap]) -> dict[str, torch.Tensor]:
    """Every weight by Hugging Face name: contiguous CPU float32 copies. Collective."""
    return _exported(maps, lambda parameter: parameter.detach())


@torch.no_grad()
def export_like(
    maps: Sequence[ParamMap], value: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """``value(parameter)`` of every trained one (its shape), by Hugging Face name. Collective."""
    return _exported([m for m in maps if m.trained], value)


def _exported(
    maps: Sequence[ParamMap], value: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for m in maps:
        for name, tensor in m.gather([value(parameter) for parameter in m.parameters]).items():
            tensors[name] = tensor.to(device="cpu", dtype=torch.float32).clone(
                memory_format=torch.contiguous_format
            )
    pipeline: Group = parallel_state.get_pipeline_model_parallel_group()
    if pipeline.size() > 1:
        stages: list[dict[str, torch.Tensor]] = [{} for _ in range(pipeline.size())]
        dist.all_gather_object(stages, tensors, group=pipeline)
        tensors = {name: tensor for stage in stages for name, tensor in stage.items()}
    return tensors
