"""Weights as an inference server wants them: one tensor per expert, and an explicit output head.

Transformers keeps a layer's experts fused (``experts.gate_up_proj [E, 2I, H]``,
``experts.down_proj [E, H, I]``); servers read the checkpoint form, ``experts.3.gate_proj.weight
[I, H]``. SGLang's Qwen3-MoE has no tied head: without ``lm_head.weight`` it samples from uniform
logits and says nothing, so the head is always written out.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from agent_rl.errors import ConfigError
from agent_rl.model.config_json import read_served_model
from agent_rl.model.folders import folder_tensors
from agent_rl.model.shape import HFNames
from agent_rl.protocols import Weights

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_SIDE_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json")
_SHARD_BYTES = 4 << 30


def serving_weights(weights: Weights, names: HFNames | None = None) -> dict[str, torch.Tensor]:
    """Return ``weights`` (Hugging Face names, fused experts or not) in checkpoint form, contiguous.

    ``names`` are the model's: some families have names of their own in folders.
    """
    tensors = folder_tensors(weights, names or HFNames())
    if HEAD not in tensors and EMBEDDING in tensors:
        tensors[HEAD] = tensors[EMBEDDING].clone()
    return tensors


def write_serving_folder(weights: Weights, folder: Path, *, template: Path) -> Path:
    """Write a checkpoint folder that a server can load; an older one of this name is replaced.

    Args:
        weights: checkpoint form, see :func:`serving_weights`.
        template: where config and tokenizer come from.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _save_shards(dict(weights), folder)
    copy_side_files(template, folder)
    return folder


def prepare_serving_folder(policy: Path, folder: Path) -> Path:
    """Write a copy of ``policy`` that any server can start from to ``folder``, and return it.

    A policy that needs no change is returned as it is.

    Raises:
        ConfigError: the policy folder has no config or no safetensors weights.
    """
    if not read_served_model(policy).tie_embeddings:
        return policy
    files = sorted(policy.glob("*.safetensors"))
    if not files:
        raise ConfigError([f"no weights: got folder {policy}, expected *.safetensors in it"])
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors |= load_file(file)
    return write_serving_folder(serving_weights(tensors), folder, template=policy)


def copy_side_files(template: Path, folder: Path) -> None:
    """Copy config (embeddings untied) and tokenizer of ``template``.

    ``generation_config.json`` is left out: its end-of-sequence ids and sampling defaults would
    join the request's own.
    """
    config = json.loads((template / "config.json").read_text())
    config["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in _SIDE_FILES:
        if (template / name).is_file():
            shutil.copyfile(template / name, folder / name)


def _save_shards(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write safetensors files of about 4 GiB with the index that loaders expect."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        num_bytes = tensor.numel() * tensor.element_size()
        if shards[-1] and size + num_bytes > _SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += num_bytes
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, file)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
