"""Writing a trainer's checkpoint: every rank its own files, flushed before the call returns."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from agent_rl.model.folders import INDEX, SIDE_FILES, folder_tensors
from agent_rl.model.shape import HFNames
from agent_rl.trainer.optimizer import PolicyOptimizer
from agent_rl.trainer.sharded.files import RankFiles
from agent_rl.trainer.sharded.owners import Owners
from agent_rl.trainer.weights import ParamMap

STATE_FOLDER = "trainer"
POSITION = "position.json"
SLICES = "slices"  # key of the metadata that says where a file's parts belong


@dataclass(frozen=True)
class Position:
    """Progress of a trainer."""

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
    on every rank when one of them could not write, for example because the disk is full.
    """
    rank = dist.get_rank()
    state_folder = folder / STATE_FOLDER
    owners, files = Owners(maps), RankFiles()
    files.folder(state_folder)
    _write_model(folder, _model_share(maps, owners, names), files)
    state, places = _optimizer_share(maps, optimizer, owners)
    path = state_folder / f"optimizer-{rank:05d}.safetensors"
    files.tensors(path, state, {SLICES: json.dumps(places)})
    files.tensors(state_folder / f"rng-{rank:05d}.safetensors", _random_state(), {})
    if rank == 0:
        position = Position(weight_version, optimizer.num_steps, dtype, dist.get_world_size())
        files.text(state_folder / POSITION, json.dumps(asdict(position), indent=1))
        for name in SIDE_FILES:
            if (policy / name).is_file():
                files.made(
                    lambda path, name=name: shutil.copyfile(policy / name, path), folder / name
                )
    files.agree()


def _model_share(
    maps: Sequence[ParamMap], owners: Owners, names: HFNames
) -> dict[str, torch.Tensor]:
    """The weights this rank writes, under the names of a folder. Collective."""
    rank, share = dist.get_rank(), dict[str, torch.Tensor]()
    for m in maps:
        local = [parameter.detach() for parameter in m.parameters]
        if ".mlp.experts." in m.hf_names[0]:  # a rank's part is whole experts: nothing to join
            if owners.of(m.slices[0]) == rank:
                held = dict(zip(m.hf_names, m.to_parts(local), strict=True))
                first = m.slices[0].index * next(iter(held.values())).shape[0]
                share |= _on_cpu(folder_tensors(held, names, first_expert=first))
            continue
        writer = owners.of_whole(m.slices)
        if m.group is None or writer in dist.get_process_group_ranks(m.group):
            whole = m.gather(local)
            if writer == rank:
                share |= _on_cpu(folder_tensors(whole, names))
    return share


def _on_cpu(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    # Copies: views of one fused tensor may not be written beside each other.
    return {name: t.to(device="cpu", copy=True).contiguous() for name, t in tensors.items()}


def _write_model(folder: Path, share: dict[str, torch.Tensor], files: RankFiles) -> None:
    """This rank's model file, and from rank 0 the index of all of them. Collective."""
    number, count = dist.get_rank() + 1, dist.get_world_size()
    if count == 1:
        files.tensors(folder / "model.safetensors", share, {"format": "pt"})
        return
    if share:
        files.tensors(folder / _model_file(number, count), share, {"format": "pt"})
    sizes = {key: t.numel() * t.element_size() for key, t in share.items()}
    shares: list[dict[str, int]] = [{} for _ in range(count)]
    dist.all_gather_object(shares, sizes)
    if number == 1:
        where = {key: _model_file(i, count) for i, one in enumerate(shares, 1) for key in one}
        total = sum(size for one in shares for size in one.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        files.text(folder / INDEX, json.dumps(index, indent=1))


def _model_file(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def _optimizer_share(
    maps: Sequence[ParamMap], optimizer: PolicyOptimizer, owners: Owners
) -> tuple[dict[str, torch.Tensor], dict[str, list[int]]]:
    """The state this rank writes by ``kind/name``, and axis, index, count of each part."""
    rank, share = dist.get_rank(), dict[str, torch.Tensor]()
    places: dict[str, list[int]] = {}
    for m in maps:
        if not m.trained:
            continue
        for kind, local in optimizer.state_of(m).items():  # collective: also where not written
            for part, tensor in zip(m.slices, m.to_parts(local), strict=True):
                if owners.of(part) == rank:
                    key = f"{kind}/{part.name}"
                    share |= _on_cpu({key: tensor})
                    places[key] = [part.axis, part.index, part.count]
    return share, places


def _random_state() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states
