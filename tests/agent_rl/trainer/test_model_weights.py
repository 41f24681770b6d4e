"""Megatron computes what transformers computes from the same folder, and gives the weights back."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from agent_rl.config import TrainerConfig
from agent_rl.errors import ConfigError
from agent_rl.trainer import cpu_backend
from agent_rl.trainer.model import ModelShape, build_model, transformer_config
from agent_rl.trainer.weights import (
    ParamMap,
    export_like,
    export_weights,
    fuse_experts,
    load_weights,
    param_maps,
    read_folder,
    split_experts,
    write_folder,
)

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


def build(folder: Path):
    shape = ModelShape.from_folder(folder)
    model = build_model(shape, transformer_config(shape, TrainerConfig(num_threads=1)))
    maps = param_maps(model, shape)
    load_weights(maps, read_folder(folder))
    return model, maps


def run(model, ids: torch.Tensor) -> torch.Tensor:
    with cpu_backend.quiet():
        return model(ids, torch.arange(ids.shape[1]).expand(*ids.shape), None)


def transformers_model(folder: Path):
    from transformers import Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("variant", VARIANTS)
def test_values_and_gradients_equal_transformers(make_policy, variant: str) -> None:
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
def test_weights_come_back_bit_exact(make_policy, tmp_path: Path, variant: str) -> None:
    folder = make_policy(**VARIANTS[variant])
    _, maps = build(folder)
    weights = export_weights(maps)
    source = dict(transformers_model(folder).named_parameters())
    assert set(weights) == set(source)
    for name, tensor in weights.items():
        assert torch.equal(tensor, source[name]), name
    write_folder(tmp_path, weights)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    for name, parameter in transformers_model(tmp_path).named_parameters():
        assert torch.equal(parameter, source[name]), name


def test_published_weights_are_copies(policy: Path) -> None:
    _, maps = build(policy)
    weights = export_weights(maps)
    weights["model.norm.weight"].zero_()
    assert bool(export_weights(maps)["model.norm.weight"].any())


def test_experts_fuse_and_split(policy: Path) -> None:
    fused = read_folder(policy)
    again = fuse_experts(split_experts(fused))
    assert set(again) == set(fused)
    assert all(torch.equal(again[name], fused[name]) for name in fused)
    lacking = split_experts(fused)
    del lacking["model.layers.1.mlp.experts.7.up_proj.weight"]
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.experts\.7\.up_proj\.weight"):
        fuse_experts(lacking)


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


def test_a_model_that_is_not_covered_is_refused(policy: Path, tmp_path: Path) -> None:
    config = json.loads((policy / "config.json").read_text())
    config |= {"model_type": "mixtral", "attention_bias": True}
    del config["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as caught:
        ModelShape.from_folder(tmp_path)
    assert len(caught.value.problems) == 3
    with pytest.raises(ConfigError, match=r"no config\.json"):
        ModelShape.from_folder(tmp_path / "absent")


def fake_group(rank: int, size: int) -> SimpleNamespace:
    """A process group as far as slicing a full tensor goes."""
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_shards_of_all_ranks_make_the_whole(policy: Path, size: int) -> None:
    _, maps = build(policy)
    tensors = read_folder(policy)
    num_split = 0
    for m in maps:
        for position, (axis, _) in enumerate(m.splits):
            num_split += 1
            shards = []
            for rank in range(size):
                splits = list(m.splits)
                splits[position] = (axis, fake_group(rank, size))
                shard = ParamMap(m.parameter, m.hf_names, tuple(splits), m.merge, m.split)
                shards.append(shard.to_local(tensors))
            assert shards[0].shape[axis] * size == m.parameter.shape[axis]
            whole = torch.cat(shards, dim=axis)
            assert torch.equal(whole, m.parameter), m.hf_names
            back = dict(zip(m.hf_names, m.split(whole), strict=True))
            assert all(torch.equal(back[name], tensors[name]) for name in m.hf_names)
    assert num_split >= 3 * 6  # qkv, output, and two axes of both expert weights, each layer


def test_a_tensor_parallel_shard_keeps_whole_heads(make_policy) -> None:
    """Rank r of two holds queries, keys and values of the r-th half of the heads."""
    folder = make_policy(num_attention_heads=4, num_key_value_heads=2)
    shape = ModelShape.from_folder(folder)
    _, maps = build(folder)
    tensors = read_folder(folder)
    (qkv,) = (m for m in maps if m.hf_names[0] == "model.layers.1.self_attn.q_proj.weight")
    for rank in range(2):
        halved = ParamMap(
            qkv.parameter, qkv.hf_names, ((0, fake_group(rank, 2)),), qkv.merge, qkv.split
        )
        local = halved.to_local(tensors)
        q, k, v = (tensors[name].chunk(2)[rank] for name in qkv.hf_names)
        assert torch.equal(local, torch.cat([q, k, v]))
    assert shape.num_heads == 4
