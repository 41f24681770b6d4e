"""A checkpoint's model on its own: what transformers and inference engines load."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from agent_rl.errors import CheckpointError, ConfigError
from agent_rl.model.folders import INDEX, SIDE_FILES
from agent_rl.trainer.checkpoint import sync
from agent_rl.trainer.checkpoint_reading import unmoved

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def export_model(checkpoint: Path, folder: Path, *, dtype: str | None = None) -> int:
    """Write model, configuration and tokenizer to the new ``folder``; returns weight bytes.

    Weights are converted to ``dtype`` if one is given; selection biases stay in float32. A tied
    output head is written out: SGLang samples from uniform logits without one. The folder appears
    when it is complete. Raises ``ConfigError`` when it exists already, ``CheckpointGoneError`` when
    a run that is going on removes the checkpoint meanwhile, ``CheckpointError`` without weights.
    """
    if folder.exists():
        raise ConfigError([f"export: got {folder}, which exists; expected a new folder"])
    aside = folder.parent / f".{folder.name}.{os.getpid()}"
    aside.mkdir(parents=True)
    try:
        with unmoved(checkpoint):
            num_bytes = _write(checkpoint, aside, dtype)
        os.rename(aside, folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return num_bytes


def _write(checkpoint: Path, folder: Path, dtype: str | None) -> int:
    where: dict[str, str] = {}
    total = 0
    files = _model_files(checkpoint)
    if not files:
        raise CheckpointError(
            f"nothing to export: got={checkpoint} without weights expected=model*.safetensors in it"
        )
    with_head = any(HEAD in names for _, names in files)
    for path, _ in files:
        tensors = dict(_tensors(path, dtype))
        if EMBEDDING in tensors and not with_head:
            tensors[HEAD] = tensors[EMBEDDING].clone()
        save_file(tensors, folder / path.name, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, path.name)
        total += sum(t.numel() * t.element_size() for t in tensors.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=1))
    for name in SIDE_FILES:
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, folder / name)
    if dtype is not None:
        config = json.loads((folder / "config.json").read_text())
        config.pop("torch_dtype", None)
        (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2))
    for path in (*folder.iterdir(), folder):
        sync(path)
    return total


def _model_files(checkpoint: Path) -> list[tuple[Path, set[str]]]:
    found = []
    for path in sorted(checkpoint.glob("model*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found.append((path, set(file.keys())))
    return found


def _tensors(path: Path, dtype: str | None) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  # not a mapping
            tensor = file.get_tensor(name)
            fixed = dtype is None or name.endswith("e_score_correction_bias")
            yield name, tensor if fixed else tensor.to(getattr(torch, str(dtype)))
