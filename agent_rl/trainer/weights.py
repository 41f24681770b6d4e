"""Weights between Hugging Face names and this rank's Megatron parameters, both ways, bit-exact.

One ``ParamMap`` a parameter says which Hugging Face tensors make it up, how they merge into the
full Megatron tensor, and along which axis a process group splits it. The same map carries
gradients, Adam moments and master weights, which have the parameter's shape: a checkpoint by
Hugging Face name does not depend on the layout that wrote it.

Names are those of ``Qwen3MoeForCausalLM.named_parameters()``, experts fused
(``mlp.experts.gate_up_proj [E, 2I, H]``). Folders hold one tensor an expert; ``fuse_experts`` and
``split_experts`` convert.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from agent_rl.errors import ConfigError
from agent_rl.trainer import cpu_backend  # noqa: F401  # before megatron: quiet import
from agent_rl.trainer.model import ModelShape

# isort: split
from megatron.core import parallel_state

Tensors = Mapping[str, torch.Tensor]
Group = Any  # torch.distributed.ProcessGroup


def _only(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0]


def _alone(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor]


@dataclass(frozen=True)
class ParamMap:
    """One Megatron parameter of this rank and the Hugging Face tensors it is made of."""

    parameter: torch.nn.Parameter
    hf_names: tuple[str, ...]
    splits: tuple[tuple[int, Group], ...] = ()  # (axis, group): shard axis over the group's ranks
    merge: Callable[[Sequence[torch.Tensor]], torch.Tensor] = _only
    split: Callable[[torch.Tensor], list[torch.Tensor]] = _alone

    def to_local(self, tensors: Tensors) -> torch.Tensor:
        """This rank's shard, made from full Hugging Face tensors."""
        full = self.merge([tensors[name] for name in self.hf_names])
        for axis, group in self.splits:
            full = full.chunk(group.size(), dim=axis)[group.rank()]
        return full

    def to_hf(self, local: torch.Tensor) -> dict[str, torch.Tensor]:
        """Full Hugging Face tensors from every rank's shard. Collective over ``splits``' groups."""
        full = local
        for axis, group in reversed(self.splits):
            if group.size() > 1:
                shards = [torch.empty_like(full) for _ in range(group.size())]
                dist.all_gather(shards, full.contiguous(), group=group)
                full = torch.cat(shards, dim=axis)
        return dict(zip(self.hf_names, self.split(full), strict=True))


def param_maps(model: Any, shape: ModelShape) -> list[ParamMap]:
    """Maps of every parameter of this rank's ``GPTModel``.

    Raises ``ConfigError`` if the model has a parameter that no map covers.
    """
    tp = parallel_state.get_tensor_model_parallel_group()
    maps: list[ParamMap] = []
    if model.pre_process:
        word = model.embedding.word_embeddings.weight
        maps.append(ParamMap(word, ("model.embed_tokens.weight",), ((0, tp),)))
    for layer in model.decoder.layers:
        maps += _layer_maps(layer, shape, tp)
    if model.post_process:
        maps.append(ParamMap(model.decoder.final_layernorm.weight, ("model.norm.weight",)))
        if not shape.tie_embeddings:
            maps.append(ParamMap(model.output_layer.weight, ("lm_head.weight",), ((0, tp),)))
        elif not model.pre_process:
            tied = ("model.embed_tokens.weight",)
            maps.append(ParamMap(model.output_layer.weight, tied, ((0, tp),)))
    covered = {id(m.parameter) for m in maps}
    missed = [name for name, p in model.named_parameters() if id(p) not in covered]
    if missed:
        raise ConfigError([f"weights: no Hugging Face counterpart for {name}" for name in missed])
    return maps


def _layer_maps(layer: Any, shape: ModelShape, tp: Group) -> Iterator[ParamMap]:
    prefix = f"model.layers.{layer.layer_number - 1}."
    attention = layer.self_attention

    def one(parameter: torch.nn.Parameter, name: str, *splits: tuple[int, Group]) -> ParamMap:
        return ParamMap(parameter, (prefix + name,), splits)

    yield one(layer.input_layernorm.weight, "input_layernorm.weight")
    yield _qkv_map(attention.linear_qkv.weight, prefix, shape, tp)
    yield one(attention.q_layernorm.weight, "self_attn.q_norm.weight")
    yield one(attention.k_layernorm.weight, "self_attn.k_norm.weight")
    yield one(attention.linear_proj.weight, "self_attn.o_proj.weight", (1, tp))
    yield one(layer.pre_mlp_layernorm.weight, "post_attention_layernorm.weight")
    if hasattr(layer.mlp, "router"):
        yield from _moe_maps(layer.mlp, prefix, shape)
    else:
        yield _gate_up_map(layer.mlp.linear_fc1.weight, prefix, shape, tp)
        yield one(layer.mlp.linear_fc2.weight, "mlp.down_proj.weight", (1, tp))


def _moe_maps(mlp: Any, prefix: str, shape: ModelShape) -> Iterator[ParamMap]:
    ep = parallel_state.get_expert_model_parallel_group()
    etp = parallel_state.get_expert_tensor_parallel_group()
    experts = (shape.num_experts, 2, shape.expert_width, shape.hidden_size)
    yield ParamMap(mlp.router.weight, (prefix + "mlp.gate.weight",))
    yield ParamMap(
        mlp.experts.weight1,
        (prefix + "mlp.experts.gate_up_proj",),
        ((0, ep), (2, etp)),
        merge=lambda tensors: tensors[0].reshape(experts),
        split=lambda full: [full.flatten(1, 2)],
    )
    down = (prefix + "mlp.experts.down_proj",)
    yield ParamMap(mlp.experts.weight2, down, ((0, ep), (2, etp)))


def _qkv_map(parameter: Any, prefix: str, shape: ModelShape, tp: Group) -> ParamMap:
    """Megatron keeps q, k, v of one key/value group together: ``[kv, q_per_kv + 2, d, H]``."""
    kv, per_kv = shape.num_kv_heads, shape.num_heads // shape.num_kv_heads

    def merge(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        heads = [t.reshape(kv, -1, shape.head_dim, shape.hidden_size) for t in tensors]
        return torch.cat(heads, dim=1).reshape(-1, shape.hidden_size)

    def split(full: torch.Tensor) -> list[torch.Tensor]:
        heads = full.reshape(kv, per_kv + 2, shape.head_dim, shape.hidden_size)
        return [t.reshape(-1, shape.hidden_size) for t in heads.split([per_kv, 1, 1], dim=1)]

    names = tuple(f"{prefix}self_attn.{kind}_proj.weight" for kind in "qkv")
    return ParamMap(parameter, names, ((0, tp),), merge, split)


def _gate_up_map(parameter: Any, prefix: str, shape: ModelShape, tp: Group) -> ParamMap:
    """A dense SwiGLU: every tensor-parallel rank holds its part of gate, then its part of up."""
    size = tp.size()

    def merge(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        parts = [t.reshape(size, -1, shape.hidden_size) for t in tensors]
        return torch.cat(parts, dim=1).reshape(-1, shape.hidden_size)

    def split(full: torch.Tensor) -> list[torch.Tensor]:
        halves = full.reshape(size, 2, -1, shape.hidden_size)
        return [halves[:, i].reshape(-1, shape.hidden_size) for i in range(2)]

    names = (f"{prefix}mlp.gate_proj.weight", f"{prefix}mlp.up_proj.weight")
    return ParamMap(parameter, names, ((0, tp),), merge, split)


@torch.no_grad()
def load_weights(maps: Sequence[ParamMap], tensors: Tensors) -> None:
    """Copy Hugging Face tensors into the parameters.

    Raises ``ConfigError`` naming every missing tensor and every shape that does not fit.
    """
    problems = []
    for m in maps:
        missing = [name for name in m.hf_names if name not in tensors]
        if missing:
            problems += [f"weights: {name} is missing" for name in missing]
            continue
        local = m.to_local(tensors)
        if local.shape != m.parameter.shape:
            got, expected = tuple(local.shape), tuple(m.parameter.shape)
            problems.append(f"weights: {m.hf_names[0]} does not fit, {got=} {expected=}")
            continue
        m.parameter.copy_(local)
    if problems:
        raise ConfigError(problems)


@torch.no_grad()
def export_weights(maps: Sequence[ParamMap]) -> dict[str, torch.Tensor]:
    """Every weight by Hugging Face name: contiguous CPU float32 copies. Collective."""
    return export_like(maps, lambda parameter: parameter.detach())


@torch.no_grad()
def export_like(
    maps: Sequence[ParamMap], value: Callable[[torch.nn.Parameter], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """``value(parameter)`` of every parameter (its shape), by Hugging Face name. Collective."""
    tensors: dict[str, torch.Tensor] = {}
    for m in maps:
        for name, tensor in m.to_hf(value(m.parameter)).items():
            tensors[name] = tensor.to(device="cpu", dtype=torch.float32).clone(
                memory_format=torch.contiguous_format
            )
    pipeline: Group = parallel_state.get_pipeline_model_parallel_group()
    if pipeline.size() > 1:
        stages: list[dict[str, torch.Tensor]] = [{} for _ in range(pipeline.size())]
        dist.all_gather_object(stages, tensors, group=pipeline)
        tensors = {name: tensor for stage in stages for name, tensor in stage.items()}
    return tensors


_EXPERT = re.compile(r"^(.*\.mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.weight$")


def fuse_experts(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Replace one tensor an expert by the fused pair; anything else is passed through."""
    fused: dict[str, torch.Tensor] = {}
    groups: dict[str, dict[tuple[str, int], torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _EXPERT.match(name)
        if match:
            prefix, expert, kind = match.groups()
            groups.setdefault(prefix, {})[kind, int(expert)] = tensor
        else:
            fused[name] = tensor
    for prefix, parts in groups.items():
        count = 1 + max(expert for _, expert in parts)
        absent = [
            f"weights: {prefix}{e}.{kind}_proj.weight is missing"
            for e in range(count)
            for kind in ("gate", "up", "down")
            if (kind, e) not in parts
        ]
        if absent:
            raise ConfigError(absent)
        fused[prefix + "gate_up_proj"] = torch.stack(
            [torch.cat([parts["gate", e], parts["up", e]]) for e in range(count)]
        )
        fused[prefix + "down_proj"] = torch.stack([parts["down", e] for e in range(count)])
    return fused


def split_experts(tensors: Tensors) -> dict[str, torch.Tensor]:
    """The inverse of ``fuse_experts``: names and shapes of a Qwen3-MoE folder."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, kind = name.rpartition(".")
        if kind == "gate_up_proj" and tensor.dim() == 3:
            for e, expert in enumerate(tensor):
                gate, up = expert.chunk(2)
                out[f"{prefix}.{e}.gate_proj.weight"] = gate
                out[f"{prefix}.{e}.up_proj.weight"] = up
        elif kind == "down_proj" and tensor.dim() == 3:
            out.update({f"{prefix}.{e}.down_proj.weight": t for e, t in enumerate(tensor)})
        else:
            out[name] = tensor
    return out


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model folder's safetensors files, experts fused."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError([f"policy.path: no *.safetensors, got={folder} expected=a model folder"])
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors.update(load_file(file))
    return fuse_experts(tensors)


def write_folder(folder: Path, tensors: Tensors) -> None:
    """Write ``folder/model.safetensors`` as transformers and the engines read it."""
    contiguous = {name: t.contiguous() for name, t in split_experts(tensors).items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
