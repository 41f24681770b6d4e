"""Reading a trainer's checkpoint, under the layout that wrote it or another one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file

from agent_rl.errors import CheckpointError
from agent_rl.model.config_json import read_shape
from agent_rl.model.folders import FolderTensors
from agent_rl.model.shape import ModelShape
from agent_rl.trainer.optimizer import PolicyOptimizer
from agent_rl.trainer.sharded.save import POSITION, SLICES, STATE_FOLDER, Position
from agent_rl.trainer.weights import ParamMap, load_weights


def open_trainer(
    folder: Path,
    maps: Sequence[ParamMap],
    optimizer: PolicyOptimizer,
    *,
    shape: ModelShape,
    dtype: str,
) -> TrainerFolder:
    """A checkpoint that this trainer can load; nothing is changed yet.

    Raises ``CheckpointError`` when ``folder`` is no trainer's checkpoint, is of another model or
    precision, or lacks a part.
    """
    saved = TrainerFolder(folder)
    if saved.position.dtype != dtype:
        raise CheckpointError(
            f"{folder}: saved with another precision, got={saved.position.dtype} expected={dtype}"
        )
    theirs = read_shape(folder)
    if differing := [f.name for f in fields(shape) if _differ(f.name, theirs, shape)]:
        named = "; ".join(
            f"{name} got={getattr(theirs, name)} expected={getattr(shape, name)}"
            for name in differing
        )
        raise CheckpointError(
            f"{folder}: saved from another model than policy.path names: {named}; "
            "resume with the policy that the run began with"
        )
    saved.require(maps, optimizer.kinds_of_state(saved.position.optimizer_steps))
    return saved


def _differ(name: str, first: ModelShape, second: ModelShape) -> bool:
    return getattr(first, name) != getattr(second, name)


def load_trainer(saved: TrainerFolder, maps: Sequence[ParamMap], optimizer: PolicyOptimizer) -> int:
    """Restore weights, optimizer, schedule and random state; returns the weight version.

    The generators are this rank's own where as many ranks wrote the checkpoint, else those of
    rank 0 on every rank.
    """
    load_weights(maps, saved.weights)
    optimizer.load_state(saved.read, saved.position.optimizer_steps)
    saved.restore_rng()
    return saved.position.weight_version


@dataclass(frozen=True)
class _Stored:
    """One part of a tensor in one file."""

    file: Any  # safetensors' lazy file
    key: str
    axis: int
    index: int
    count: int


class TrainerFolder:
    """A checkpoint: weights, and the optimizer's state by kind and Hugging Face name.

    Tensors are read on demand.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / STATE_FOLDER
        self.position = _position(self._folder / POSITION, folder)
        self.weights = FolderTensors(folder)
        self._parts: dict[str, list[_Stored]] = {}
        for path in sorted(self._folder.glob("optimizer-*.safetensors")):
            file = safe_open(path, framework="pt")
            places: Mapping[str, Sequence[int]] = json.loads((file.metadata() or {})[SLICES])
            for key, (axis, index, count) in places.items():
                self._parts.setdefault(key, []).append(_Stored(file, key, axis, index, count))
        for key, parts in self._parts.items():
            got, expected = sorted(p.index for p in parts), list(range(parts[0].count))
            if got != expected:
                raise CheckpointError(f"{folder}: {key} is incomplete, {got=} {expected=} parts")

    def require(self, maps: Sequence[ParamMap], kinds: Sequence[str]) -> None:
        """Raises ``CheckpointError`` naming weights and state of the parameters that are absent."""
        names = [name for m in maps for name in m.hf_names]
        absent = [name for name in names if name not in self.weights]
        trained = [name for m in maps if m.trained for name in m.hf_names]
        keys = [f"{kind}/{name}" for kind in kinds for name in trained]
        absent += [key for key in keys if key not in self._parts]
        if absent:
            shown = ", ".join(absent[:3]) + (" …" if len(absent) > 3 else "")
            raise CheckpointError(
                f"{self._folder.parent} is incomplete: got={len(names) + len(keys) - len(absent)} "
                f"tensors expected={len(names) + len(keys)}; absent: {shown}"
            )

    def read(self, kind: str, m: ParamMap) -> list[torch.Tensor]:
        """The state of a map's parameters on this rank."""
        parts = [self.part(kind, s.name, s.axis, s.index, s.count) for s in m.slices]
        return m.to_local(parts)

    def part(self, kind: str, name: str, axis: int, index: int, count: int) -> torch.Tensor:
        """The ``index``-th of ``count`` equal parts along ``axis``, however it was saved."""
        key = f"{kind}/{name}"
        stored = sorted(self._parts[key], key=lambda p: p.index)
        if stored[0].count > 1 and stored[0].axis != axis and count > 1:
            whole = torch.cat([p.file.get_tensor(key) for p in stored], dim=stored[0].axis)
            return whole.chunk(count, dim=axis)[index]
        axis = stored[0].axis if stored[0].count > 1 else axis
        size = stored[0].file.get_slice(key).get_shape()[axis] if stored[0].count * count > 1 else 0
        if not size:  # one part is asked for and one is there; it may have no axis at all
            return stored[0].file.get_tensor(key)
        total = size * len(stored)
        if total % count:
            raise CheckpointError(f"{key}: got={total} along axis {axis}, not in {count} parts")
        start, stop = index * total // count, (index + 1) * total // count
        pieces = []
        for p in stored:
            first = max(start, p.index * size) - p.index * size
            last = min(stop, (p.index + 1) * size) - p.index * size
            if first < last:
                lazy = p.file.get_slice(key)
                pieces.append(lazy[first:last] if axis == 0 else lazy[:, first:last])
        return torch.cat(pieces, dim=axis)

    def restore_rng(self) -> None:
        rank = dist.get_rank() if self.position.num_ranks == dist.get_world_size() else 0
        states = load_file(self._folder / f"rng-{rank:05d}.safetensors")
        torch.set_rng_state(states["cpu"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])


def _position(path: Path, folder: Path) -> Position:
    if not path.is_file():
        raise CheckpointError(f"not a trainer checkpoint: got={folder} expected={path}")
    try:
        return Position(**json.loads(path.read_text()))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
