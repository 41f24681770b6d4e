"""The one reader of a model folder's ``config.json``; loads no torch.

The trainer takes a ``ModelShape``, of the families that it covers. Inference servers run other
families too: what talks to them needs a ``ServedModel`` only, which any Mixture of Experts has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from agent_rl.errors import ConfigError
from agent_rl.model.families import FAMILIES
from agent_rl.model.families.common import stepped_moe_layers
from agent_rl.model.families.fields import Fields
from agent_rl.model.shape import HFNames, ModelShape
from routing_cache import RowLayout

_NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token")


@dataclass(frozen=True)
class ServedModel:
    """The facts about a served model that its client needs."""

    layout: RowLayout
    vocab_size: int
    model_type: str
    tie_embeddings: bool
    names: HFNames  # Qwen's for a family that is not covered


def read_shape(folder: Path) -> ModelShape:
    """Return the shape of a model that the trainer covers.

    Raises ``ConfigError`` naming all that is not covered: a model without a router, or settings
    that Megatron would compute differently.
    """
    path, raw = _read(folder)
    kind = _model_type(path, raw)
    if kind not in FAMILIES:
        raise ConfigError(
            [
                f"{path}: model_type not covered, got={kind!r} expected=one of {sorted(FAMILIES)}; "
                "CONTRIBUTING.md says how to add a family"
            ]
        )
    fields = Fields(raw)
    shape = FAMILIES[kind](fields)
    _require_none(path, [*fields.missing, *fields.not_covered])
    if not shape.moe_layers:
        raise _dense(path, kind)
    return shape


def read_served_model(folder: Path) -> ServedModel:
    """Return what a client of an inference server needs, for a Mixture of Experts of any family.

    Raises ``ConfigError``: no configuration, a model without a router, or a field that is missing.
    """
    path, raw = _read(folder)
    raw = cast(dict[str, Any], raw.get("text_config", raw))  # of models that see as well
    kind = _model_type(path, raw)
    if kind in FAMILIES:
        fields = Fields(raw)
        shape = FAMILIES[kind](fields)
        # A server may run what the trainer does not cover, such as quantised weights.
        if shape.moe_layers and not fields.missing and raw.get("moe_layer_freq", 1) == 1:
            return ServedModel(
                shape.row_layout, shape.vocab_size, kind, shape.tie_embeddings, shape.names
            )
    return _of_any_family(path, kind, raw)


def _read(folder: Path) -> tuple[Path, dict[str, Any]]:
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError([f"policy.path: no config.json, got={folder} expected=a model folder"])
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError([f"{path}: not JSON ({error})"]) from error
    if not isinstance(raw, dict):
        raise ConfigError([f"{path}: got a {type(raw).__name__}, expected a JSON object"])
    return path, cast(dict[str, Any], raw)


def _model_type(path: Path, raw: Mapping[str, Any]) -> str:
    """Return the family's name; raises ``ConfigError`` for one that has no experts."""
    kind, texts = str(raw.get("model_type")), raw.get("text_config", raw)
    if kind not in FAMILIES and not any(texts.get(name) for name in _NUM_EXPERTS):
        raise _dense(path, kind)
    return kind


def _dense(path: Path, kind: str) -> ConfigError:
    return ConfigError(
        [
            f"{path}: got a dense model (model_type {kind!r}), which has no router and so nothing "
            "to replay; expected a Mixture-of-Experts model, with experts in at least one layer"
        ]
    )


def _require_none(path: Path, problems: list[str]) -> None:
    if problems:
        raise ConfigError([f"{path}: {problem}" for problem in dict.fromkeys(problems)])


def _of_any_family(path: Path, kind: str, raw: Mapping[str, Any]) -> ServedModel:
    """Read the fields that Mixture-of-Experts configurations have in common."""
    fields = Fields(raw)
    layers, vocab_size = fields.int("num_hidden_layers"), fields.int("vocab_size")
    num_experts, moe_top_k = fields.int(*_NUM_EXPERTS), fields.int(*_TOP_K)
    _require_none(path, fields.missing)
    moe_layers = _moe_layers(fields, raw)
    if not moe_layers:
        raise _dense(path, kind)
    layout = RowLayout(layers, moe_layers, num_experts=num_experts, moe_top_k=moe_top_k)
    return ServedModel(layout, vocab_size, kind, fields.bool("tie_word_embeddings"), HFNames())


def _moe_layers(fields: Fields, raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the global numbers of the layers that have a router."""
    count, step = fields.int("num_hidden_layers"), raw.get("moe_layer_freq")
    if isinstance(step, list):
        return tuple(layer for layer in range(count) if step[layer])
    # DeepSeek's step counts from layer 0, Qwen's from 1.
    stepped = range(0, count, step) if step else stepped_moe_layers(fields)
    prefix = fields.maybe_int("first_k_dense_replace") or 0
    return tuple(layer for layer in stepped if layer >= prefix)
