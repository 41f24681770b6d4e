"""Writing a trainer's checkpoint: every rank its own files, flushed before the call returns."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from agent_rl.trainer import cpu_backend  # noqa: F401  # before megatron: quiet import
from agent_rl.trainer.folders import INDEX, SIDE_FILES, folder_tensors
from agent_rl.trainer.optimizer import PolicyOptimizer
from agent_rl.trainer.shape import HFNames
from agent_rl.trainer.sharded.owners import Owners
from agent_rl.trainer.weights import ParamMap

# isort: split
from megatron.core import parallel_state

STATE_FOLDER = "trainer"
POSITION = "position.json"
SLICES = "slices"  # key of the metadata that says where a file's parts belong


@dataclass(frozen=True)
class Position:
    """How far a trainer is."""

    weight_version: int
    optimizer_steps: int
    dtype: str
    num_ranks: int


@torch.no_grad()
def save_trainer(
    folder: Path,
    maps: Sequence[ParamMap],
    optimizer: PolicyOptimizer,
    *,
    names: HFNames,
    policy: Path,
    weight_version: int,
    dtype: str,
) -> None:
    """Write this rank's files into ``folder``, which every rank sees. Collective.

    ``policy`` is the folder that configuration and tokenizer are copied from. Raises ``OSError``
    when the disk is full.
    """
    rank = dist.get_rank()
    state_folder = folder / STATE_FOLDER
    state_folder.mkdir(exist_ok=True)
    owners = Owners(maps)
    written = _write_model(folder, maps, owners, names)
    written.append(_write_optimizer(state_folder, maps, optimizer, owners))
    written.append(_write_rng(state_folder / f"rng-{rank:05d}.safetensors"))
    if rank == 0:
        position = Position(weight_version, optimizer.num_steps, dtype, dist.get_world_size())
        path = state_folder / POSITION
        path.write_text(json.dumps(asdict(position), indent=1))
        written.append(path)
        for name in SIDE_FILES:
            if (policy / name).is_file():
                written.append(Path(shutil.copyfile(policy / name, folder / name)))
    _flush(written)


def _write_model(
    folder: Path, maps: Sequence[ParamMap], owners: Owners, names: HFNames
) -> list[Path]:
    """This rank's share of the model as a file transformers loads."""
    experts = parallel_state.get_expert_model_parallel_group()
    rank, tensors = dist.get_rank(), dict[str, torch.Tensor]()
    for m in maps:
        local = [parameter.detach() for parameter in m.parameters]
        if _is_expert(m):
            part = m.slices[0]
            if owners.of(part) == rank:
                held = dict(zip(m.hf_names, m.to_parts(local), strict=True))
                first = experts.rank() * next(iter(held.values())).shape[0]
                tensors |= _on_cpu(folder_tensors(held, names, first_expert=first))
            continue
        writer = owners.of_whole(m.slices)
        if m.group is None or writer in dist.get_process_group_ranks(m.group):
            whole = m.gather(local)
            if writer == rank:
                tensors |= _on_cpu(folder_tensors(whole, names))
    return _write_model_file(folder, tensors)


def _is_expert(m: ParamMap) -> bool:
    return ".mlp.experts." in m.hf_names[0]


def _on_cpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    # Views of one fused tensor would each be saved with all of its memory.
    return {name: t.to(device="cpu", copy=True).contiguous() for name, t in tensors.items()}


def _write_model_file(folder: Path, tensors: dict[str, torch.Tensor]) -> list[Path]:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    name = f"model-{rank + 1:05d}-of-{num_ranks:05d}.safetensors"
    if num_ranks == 1:
        name = "model.safetensors"
    if tensors:
        save_file(tensors, folder / name, metadata={"format": "pt"})
    if num_ranks == 1:
        return [folder / name]
    sizes = {key: t.numel() * t.element_size() for key, t in tensors.items()}
    shares: list[dict[str, int]] = [{} for _ in range(num_ranks)]
    dist.all_gather_object(shares, sizes)
    written = [folder / name] if tensors else []
    if rank == 0:
        files = {
            key: f"model-{number:05d}-of-{num_ranks:05d}.safetensors"
            for number, share in enumerate(shares, 1)
            for key in share
        }
        total = sum(size for share in shares for size in share.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=1))
        written.append(folder / INDEX)
    return written


def _write_optimizer(
    folder: Path, maps: Sequence[ParamMap], optimizer: PolicyOptimizer, owners: Owners
) -> Path:
    """The optimizer's state of the parts this rank writes; empty before the first step."""
    rank, tensors = dist.get_rank(), dict[str, torch.Tensor]()
    places: dict[str, list[int]] = {}
    for m in maps:
        if not m.trained:
            continue
        for kind, local in optimizer.state_of(m).items():  # collective: also where not written
            for part, tensor in zip(m.slices, m.to_parts(local), strict=True):
                if owners.of(part) == rank:
                    key = f"{kind}/{part.name}"
                    tensors |= _on_cpu({key: tensor})
                    places[key] = [part.axis, part.index, part.count]
    path = folder / f"optimizer-{rank:05d}.safetensors"
    save_file(tensors, path, metadata={SLICES: json.dumps(places)})
    return path


def _write_rng(path: Path) -> Path:
    states: dict[str, torch.Tensor] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    save_file(states, path)
    return path


def _flush(files: Iterable[Path]) -> None:
    """A checkpoint's manifest vouches for bytes on the disk, not for those in a cache."""
    for path in files:
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
