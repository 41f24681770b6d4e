"""Megatron computes what transformers computes from the same folder, and gives the weights back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fixture_types import MakePolicy
from safetensors.torch import save_file

from agent_rl.config.schema import TrainerConfig
from agent_rl.errors import ConfigError
from agent_rl.model.config_json import read_shape
from agent_rl.model.folders import INDEX, FolderTensors, folder_tensors, read_folder, write_folder
from agent_rl.model.shape import HFNames
from agent_rl.trainer import cpu_backend
from agent_rl.trainer.model import build_model, transformer_config
from agent_rl.trainer.param_maps import ParamMap, param_maps
from agent_rl.trainer.weights import export_like, export_weights, load_weights

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("process_group")]

VARIANTS = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "grouped queries": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "dense first layer": {"num_hidden_layers": 4, "mlp_only_layers": [0]},
    "alternating": {"num_hidden_layers": 4, "decoder_sparse_step": 2},
    "not normalised": {"norm_topk_prob": False},
    "other theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
}


def build(folder: Path) -> tuple[torch.nn.Module, list[ParamMap]]:
    shape = read_shape(folder)
    model = build_model(shape, transformer_config(shape, TrainerConfig(num_threads=1)))
    maps = param_maps(model, shape)
    load_weights(maps, read_folder(folder))
    return model, maps


def run(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with cpu_backend.quiet():
        return model(ids, torch.arange(ids.shape[1]).expand(*ids.shape), None)


def transformers_model(folder: Path) -> Any:
    from transformers import Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("variant", VARIANTS)
def test_values_and_gradients_equal_transformers(make_policy: MakePolicy, variant: str) -> None:
    folder = make_policy(**VARIANTS[variant])
    model, maps = build(folder)
    other = transformers_model(folder)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 200, (3, 24), generator=generator)
    ours, theirs = run(model, ids), other(ids).logits
    assert float(theirs.detach().std()) > 0.3  # a flat distribution would agree by accident
    assert float((ours - theirs).detach().abs().max()) <= 1e-4
    for logits in (ours, theirs):
        F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    grads = export_like(maps, lambda p: p.grad)
    for name, parameter in other.named_parameters():
        difference = (grads[name] - parameter.grad).norm() / parameter.grad.norm()
        assert float(difference) <= 1e-5, name


@pytest.mark.parametrize("variant", ["tied", "untied", "dense first layer", "grouped queries"])
def test_weights_come_back_bit_exact(make_policy: MakePolicy, tmp_path: Path, variant: str) -> None:
    folder = make_policy(**VARIANTS[variant])
    _, maps = build(folder)
    weights = export_weights(maps)
    source = dict(transformers_model(folder).named_parameters())
    assert set(weights) == set(source)
    for name, tensor in weights.items():
        assert torch.equal(tensor, source[name]), name
    write_folder(tmp_path, weights, HFNames())
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    for name, parameter in transformers_model(tmp_path).named_parameters():
        assert torch.equal(parameter, source[name]), name


def test_published_weights_are_copies(policy: Path) -> None:
    _, maps = build(policy)
    weights = export_weights(maps)
    weights["model.norm.weight"].zero_()
    assert bool(export_weights(maps)["model.norm.weight"].any())


def test_an_expert_without_all_its_tensors_is_named(policy: Path, tmp_path: Path) -> None:
    lacking = folder_tensors(read_folder(policy), HFNames())
    del lacking["model.layers.1.mlp.experts.7.up_proj.weight"]
    save_file(lacking, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.experts\.7\.up_proj\.weight"):
        FolderTensors(tmp_path)


def test_only_the_files_of_the_index_are_read(policy: Path, tmp_path: Path) -> None:
    """Published folders may hold a second copy of the weights in another layout."""
    save_file({"tok_embeddings.weight": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    whole = folder_tensors(read_folder(policy), HFNames())
    save_file(whole, tmp_path / "model-00001-of-00001.safetensors")
    files = dict.fromkeys(whole, "model-00001-of-00001.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": files}))
    assert set(read_folder(tmp_path)) == set(read_folder(policy))
    (tmp_path / "model-00001-of-00001.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-00001-of-00001\.safetensors is missing"):
        read_folder(tmp_path)


def test_faults_in_the_tensors_are_all_named(policy: Path) -> None:
    _, maps = build(policy)
    tensors = read_folder(policy)
    del tensors["model.norm.weight"]
    tensors["model.layers.2.mlp.gate.weight"] = torch.zeros(31, 64)
    with pytest.raises(ConfigError) as caught:
        load_weights(maps, tensors)
    assert len(caught.value.problems) == 2
    assert any("model.norm.weight is missing" in p for p in caught.value.problems)
    assert any("got=(31, 64) expected=(32, 64)" in p for p in caught.value.problems)


def fake_group(rank: int, size: int) -> SimpleNamespace:
    """A process group as far as slicing a full tensor goes."""
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_parts_of_all_ranks_make_the_whole(make_policy: MakePolicy, size: int) -> None:
    folder = make_policy(num_attention_heads=8, num_key_value_heads=4, mlp_only_layers=[0])
    _, maps = build(folder)
    source, tensors = FolderTensors(folder), read_folder(folder)
    num_split = 0
    for m in (m for m in maps if m.group is not None):
        num_split += 1
        parts = []
        for rank in range(size):
            mine = dataclasses.replace(m, group=fake_group(rank, size))
            local = mine.read(source)
            assert sum(t.numel() for t in local) * size == sum(p.numel() for p in m.parameters)
            parts.append(mine.to_parts(local))
        for name, column in zip(m.hf_names, zip(*parts, strict=True), strict=True):
            assert torch.equal(torch.cat(column, dim=m.axis), tensors[name])
    assert num_split == 1 + 3 * 2 + 2 + 2 * 2  # embedding, attention, dense MLP, experts


def test_a_tensor_parallel_shard_keeps_whole_heads(make_policy: MakePolicy) -> None:
    """Rank r of two holds queries, keys and values of the r-th half of the heads."""
    folder = make_policy(num_attention_heads=4, num_key_value_heads=2)
    _, maps = build(folder)
    tensors = read_folder(folder)
    (qkv,) = (m for m in maps if m.hf_names[0] == "model.layers.1.self_attn.q_proj.weight")
    for rank in range(2):
        halved = dataclasses.replace(qkv, group=fake_group(rank, 2))
        (local,) = halved.read(FolderTensors(folder))
        q, k, v = (tensors[name].chunk(2)[rank] for name in qkv.hf_names)
        assert torch.equal(local, torch.cat([q, k, v]))
