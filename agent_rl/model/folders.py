"""Model folders: safetensors with one tensor per expert, as transformers and the engines read them.

Inside the program experts are fused (``mlp.experts.gate_up_proj [E, 2I, H]``,
``mlp.experts.down_proj [E, H, I]``) and the MLP block is called ``mlp``; in folders the same
tensors are ``mlp.experts.7.gate_proj.weight`` and so on, in Mixtral's
``block_sparse_moe.experts.7.w1.weight``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from agent_rl.errors import ConfigError
from agent_rl.model.shape import HFNames

INDEX = "model.safetensors.index.json"
SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
_EXPERT = re.compile(
    r"^(.*\.(?:mlp|block_sparse_moe)\.experts\.)(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight$"
)
_KINDS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


class FolderTensors:
    """The tensors of a model folder under transformers' names, experts fused; read on demand.

    Implements ``TensorSource``: a rank reads from disk only what it holds. Raises ``ConfigError``
    when there are no tensors, a listed file is absent or an expert is incomplete.
    """

    def __init__(self, folder: Path) -> None:
        self._plain: dict[str, tuple[Any, str]] = {}
        self._experts: dict[str, dict[tuple[str, int], tuple[Any, str]]] = {}
        for path in _tensor_files(folder):
            file = safe_open(path, framework="pt")
            for key in file.keys():  # noqa: SIM118  # not a mapping
                self._add(file, key)
        self._counts = _expert_counts(self._experts)

    def _add(self, file: Any, key: str) -> None:
        match = _EXPERT.match(key)
        if match is None:
            self._plain[_inside(key)] = (file, key)
            return
        prefix, expert, kind = _inside(match[1]), int(match[2]), _KINDS.get(match[3], match[3])
        self._experts.setdefault(prefix, {})[kind, expert] = (file, key)

    def names(self) -> list[str]:
        fused = [
            prefix + kind for prefix in self._experts for kind in ("gate_up_proj", "down_proj")
        ]
        return [*self._plain, *fused]

    def __contains__(self, name: str) -> bool:
        prefix = name.removesuffix("gate_up_proj").removesuffix("down_proj")
        return name in self._plain or (prefix != name and prefix in self._experts)

    def part(self, name: str, axis: int, index: int, count: int) -> torch.Tensor:
        """Return the ``index``-th of ``count`` equal parts along ``axis`` of a tensor."""
        if name in self._plain:
            file, key = self._plain[name]
            return _slice(file.get_slice(key), axis, index, count)
        prefix = name.removesuffix("gate_up_proj").removesuffix("down_proj")
        parts, total = self._experts[prefix], self._counts[prefix]
        mine = range(total)
        if axis == 0:
            mine = range(index * total // count, (index + 1) * total // count)
        fused = torch.stack([_expert(parts, name, expert) for expert in mine])
        return fused if axis == 0 else fused.chunk(count, dim=axis)[index]


def _expert(
    parts: Mapping[tuple[str, int], tuple[Any, str]], name: str, expert: int
) -> torch.Tensor:
    kinds = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
    tensors = []
    for kind in kinds:
        file, key = parts[kind, expert]
        tensors.append(file.get_tensor(key))
    return torch.cat(tensors)


def _slice(lazy: Any, axis: int, index: int, count: int) -> torch.Tensor:
    shape = lazy.get_shape()
    if count == 1:
        return lazy[:]
    if shape[axis] % count:
        raise IndexError(f"axis {axis}: got={shape[axis]} expected=a multiple of {count}")
    size = shape[axis] // count
    cut = slice(index * size, (index + 1) * size)
    return lazy[cut] if axis == 0 else lazy[:, cut]


def _tensor_files(folder: Path) -> list[Path]:
    """Return the files that the index names, else all: some folders hold the weights twice."""
    index = folder / INDEX
    if index.is_file():
        files = sorted(
            {folder / str(n) for n in json.loads(index.read_text())["weight_map"].values()}
        )
        absent = [f"{index}: {file.name} is missing" for file in files if not file.is_file()]
        if absent:
            raise ConfigError(absent)
        return files
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError([f"policy.path: no *.safetensors, got={folder} expected=a model folder"])
    return files


def _expert_counts(experts: Mapping[str, Mapping[tuple[str, int], object]]) -> dict[str, int]:
    counts = {prefix: 1 + max(e for _, e in parts) for prefix, parts in experts.items()}
    absent = [
        f"weights: {prefix}{e}.{kind}.weight is missing"
        for prefix, parts in experts.items()
        for e in range(counts[prefix])
        for kind in ("gate_proj", "up_proj", "down_proj")
        if (kind, e) not in parts
    ]
    if absent:
        raise ConfigError(absent)
    return counts


def _inside(name: str) -> str:
    return name.replace(".block_sparse_moe.", ".mlp.")


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a model folder, whole, experts fused."""
    tensors = FolderTensors(folder)
    return {name: tensors.part(name, 0, 0, 1) for name in tensors.names()}


def folder_tensors(
    tensors: Mapping[str, torch.Tensor], names: HFNames, *, first_expert: int = 0
) -> dict[str, torch.Tensor]:
    """Return fused tensors under the names of a folder, one tensor per expert, contiguous.

    ``first_expert`` is the number of the first expert in ``tensors``, which may hold a run of them.
    """
    gate, up, down = names.expert_parts
    out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        renamed = name.replace(".mlp.", f".{names.folder_mlp}")
        stem, _, kind = renamed.rpartition(".")
        if ".mlp.experts." not in name or kind == "weight":  # the latter: split already
            out[renamed] = tensor.contiguous()
        elif kind == "gate_up_proj":
            for e, expert in enumerate(tensor, first_expert):
                halves = expert.chunk(2)
                out[f"{stem}.{e}.{gate}.weight"] = halves[0].contiguous()
                out[f"{stem}.{e}.{up}.weight"] = halves[1].contiguous()
        else:
            for e, expert in enumerate(tensor, first_expert):
                out[f"{stem}.{e}.{down}.weight"] = expert.contiguous()
    return out


def write_folder(folder: Path, tensors: Mapping[str, torch.Tensor], names: HFNames) -> None:
    """Write ``folder/model.safetensors`` as transformers and the engines read it."""
    whole = folder_tensors(tensors, names)
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
