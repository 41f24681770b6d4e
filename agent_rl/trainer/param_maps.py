"""The maps of a ``GPTModel``'s parameters, for both layer specs.

Two tables differ between them:

                      portable                        Transformer Engine
    norm before attn  input_layernorm.weight          self_attention.linear_qkv.layer_norm_weight
    norm before MLP   pre_mlp_layernorm.weight        mlp.linear_fc1.layer_norm_weight (dense)
    latent norms      q_layernorm, kv_layernorm       linear_{q,kv}_up_proj.layer_norm_weight
    experts           weight1 [E, 2, I, H]            linear_fc1.weight0.. [2I, H] each
                      weight2 [E, H, I]               linear_fc2.weight0.. [H, I] each

Axis letters: E experts, H hidden width, I expert or MLP width, d head width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from agent_rl.errors import ConfigError
from agent_rl.model.shape import ModelShape
from agent_rl.trainer import cpu_backend  # noqa: F401  # before megatron: quiet import
from agent_rl.trainer.weights import Group, ParamMap, Parts

# isort: split
from megatron.core import parallel_state


def param_maps(model: Any, shape: ModelShape) -> list[ParamMap]:
    """Maps of every parameter of this rank's ``GPTModel``, and of its routers' selection biases.

    Raises ``ConfigError`` if the model has a parameter that no map covers.
    """
    tp = parallel_state.get_tensor_model_parallel_group()
    maps: list[ParamMap] = []
    if model.pre_process:
        word = model.embedding.word_embeddings.weight
        maps.append(ParamMap((word,), ("model.embed_tokens.weight",), 0, tp))
    for layer in model.decoder.layers:
        maps += _LayerMaps(layer, shape, tp).all()
    if model.post_process:
        maps.append(ParamMap((model.decoder.final_layernorm.weight,), ("model.norm.weight",)))
        if not shape.tie_embeddings:
            maps.append(ParamMap((model.output_layer.weight,), ("lm_head.weight",), 0, tp))
        elif not model.pre_process:
            tied = ("model.embed_tokens.weight",)
            maps.append(ParamMap((model.output_layer.weight,), tied, 0, tp))
    covered = {id(parameter) for m in maps for parameter in m.parameters}
    missed = [name for name, p in model.named_parameters() if id(p) not in covered]
    if missed:
        raise ConfigError([f"weights: no Hugging Face counterpart for {name}" for name in missed])
    _mark_shared_out(maps, tp)
    return maps


def _mark_shared_out(maps: Iterable[ParamMap], tp: Group) -> None:
    """Mark what the tensor-parallel ranks share out, before an optimizer is made.

    Megatron marks parameters where it initialises them, which it does not where every weight is
    loaded. Without the mark the gradient norm takes them for copies and leaves out all parts but
    the first rank's: clipping would depend on the layout.
    """
    for m in (m for m in maps if m.group is tp):
        for parameter in m.parameters:
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
            parameter.partition_dim = m.axis  # type: ignore[attr-defined]
            parameter.partition_stride = 1  # type: ignore[attr-defined]


class _LayerMaps:
    """The maps of one transformer layer."""

    def __init__(self, layer: Any, shape: ModelShape, tp: Group) -> None:
        self._layer, self._shape, self._tp = layer, shape, tp
        self._prefix = f"model.layers.{layer.layer_number - 1}."

    def all(self) -> Iterator[ParamMap]:
        layer, attention = self._layer, self._layer.self_attention
        first = attention.linear_qkv if hasattr(attention, "linear_qkv") else None
        yield self._norm(layer.input_layernorm, first, "input_layernorm.weight")
        yield from self._queries() if self._shape.latent is None else self._latent_queries()
        yield self._one(attention.linear_proj.weight, "self_attn.o_proj.weight", 1, self._tp)
        dense = None if hasattr(layer.mlp, "router") else layer.mlp.linear_fc1
        yield self._norm(layer.pre_mlp_layernorm, dense, "post_attention_layernorm.weight")
        if dense is None:
            yield from self._experts()
        else:
            yield from self._swiglu(layer.mlp, "mlp.")

    def _one(
        self, parameter: torch.Tensor, name: str, axis: int = 0, group: Group | None = None
    ) -> ParamMap:
        return ParamMap((parameter,), (self._prefix + name,), axis, group)

    def _norm(self, own: Any, fused_into: Any, name: str) -> ParamMap:
        """A norm of its own, or one that a linear layer carries."""
        weight = getattr(own, "weight", None)
        return self._one(fused_into.layer_norm_weight if weight is None else weight, name)

    def _queries(self) -> Iterator[ParamMap]:
        """Megatron keeps q, k, v of one key/value head together: ``[kv, q_per_kv + 2, d, ..]``."""
        shape, attention = self._shape, self._layer.self_attention
        per_kv, head_dim = shape.num_heads // shape.num_kv_heads, shape.head_dim

        def together(parts: Parts) -> list[torch.Tensor]:
            kv = parts[1].shape[0] // head_dim
            heads = [t.reshape(kv, -1, head_dim, *t.shape[1:]) for t in parts]
            return [torch.cat(heads, dim=1).flatten(0, 2)]

        def apart(local: Parts) -> list[torch.Tensor]:
            (fused,) = local
            heads = fused.reshape(-1, per_kv + 2, head_dim, *fused.shape[1:])
            return [t.flatten(0, 2) for t in heads.split([per_kv, 1, 1], dim=1)]

        for kind in ("weight", "bias") if shape.qkv_bias else ("weight",):
            fused = getattr(attention.linear_qkv, kind)
            names = tuple(f"{self._prefix}self_attn.{part}_proj.{kind}" for part in "qkv")
            yield ParamMap((fused,), names, 0, self._tp, together, apart)
        if shape.qk_norm:
            yield self._one(attention.q_layernorm.weight, "self_attn.q_norm.weight")
            yield self._one(attention.k_layernorm.weight, "self_attn.k_norm.weight")

    def _latent_queries(self) -> Iterator[ParamMap]:
        attention, tp = self._layer.self_attention, self._tp
        assert self._shape.latent is not None
        if self._shape.latent.q_rank is None:
            yield self._one(attention.linear_q_proj.weight, "self_attn.q_proj.weight", 0, tp)
        else:
            yield self._one(attention.linear_q_down_proj.weight, "self_attn.q_a_proj.weight")
            yield self._norm(
                attention.q_layernorm, attention.linear_q_up_proj, "self_attn.q_a_layernorm.weight"
            )
            yield self._one(attention.linear_q_up_proj.weight, "self_attn.q_b_proj.weight", 0, tp)
        down = attention.linear_kv_down_proj.weight  # whole on every rank, as are queries'
        yield self._one(down, "self_attn.kv_a_proj_with_mqa.weight")
        yield self._norm(
            attention.kv_layernorm, attention.linear_kv_up_proj, "self_attn.kv_a_layernorm.weight"
        )
        yield self._one(attention.linear_kv_up_proj.weight, "self_attn.kv_b_proj.weight", 0, tp)

    def _swiglu(self, mlp: Any, below: str) -> Iterator[ParamMap]:
        """Every tensor-parallel rank holds its part of gate, then its part of up."""
        names = (f"{self._prefix}{below}gate_proj.weight", f"{self._prefix}{below}up_proj.weight")
        yield ParamMap(
            (mlp.linear_fc1.weight,),
            names,
            0,
            self._tp,
            to_local=lambda parts: [torch.cat(list(parts))],
            to_parts=lambda local: list(local[0].chunk(2)),
        )
        yield self._one(mlp.linear_fc2.weight, f"{below}down_proj.weight", 1, self._tp)

    def _experts(self) -> Iterator[ParamMap]:
        mlp, shape = self._layer.mlp, self._shape
        yield self._one(mlp.router.weight, "mlp.gate.weight")
        if shape.router.selection_bias:
            name = self._prefix + "mlp.gate.e_score_correction_bias"
            yield ParamMap((mlp.router.expert_bias,), (name,), trained=False)
        grouped = hasattr(mlp.experts, "linear_fc1")
        yield from self._grouped_experts() if grouped else self._stacked_experts()
        if shape.shared_width:
            yield from self._swiglu(mlp.shared_experts, shape.names.shared)
        if shape.shared_gate:
            yield self._one(mlp.shared_experts.gate_weight, "mlp.shared_expert_gate.weight")

    def _stacked_experts(self) -> Iterator[ParamMap]:
        experts, ep = self._layer.mlp.experts, _expert_group()
        yield ParamMap(
            (experts.weight1,),
            (self._prefix + "mlp.experts.gate_up_proj",),
            0,
            ep,
            to_local=lambda parts: [parts[0].unflatten(1, (2, -1))],
            to_parts=lambda local: [local[0].flatten(1, 2)],
        )
        yield self._one(experts.weight2, "mlp.experts.down_proj", 0, ep)

    def _grouped_experts(self) -> Iterator[ParamMap]:
        """Transformer Engine keeps one parameter per expert."""
        experts, ep = self._layer.mlp.experts, _expert_group()
        count = self._shape.num_experts // ep.size()
        for linear, name in (
            (experts.linear_fc1, "mlp.experts.gate_up_proj"),
            (experts.linear_fc2, "mlp.experts.down_proj"),
        ):
            yield ParamMap(
                tuple(getattr(linear, f"weight{i}") for i in range(count)),
                (self._prefix + name,),
                0,
                ep,
                to_local=lambda parts: list(parts[0].unbind()),
                to_parts=lambda local: [torch.stack(list(local))],
            )


def _expert_group() -> Group:
    """The ranks that share out a layer's experts; none of them splits a single expert."""
    etp: Group = parallel_state.get_expert_tensor_parallel_group()
    if etp.size() != 1:
        raise ConfigError([f"expert tensor parallelism: got={etp.size()} expected=1"])
    return parallel_state.get_expert_model_parallel_group()
