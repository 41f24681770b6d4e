"""What a model folder's ``config.json`` says that an HTTP engine must know; no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_rl.errors import ConfigError
from routing_cache import RowLayout


@dataclass(frozen=True)
class ServedModel:
    """Shape of a served model's rows, and how many token ids it knows."""

    layout: RowLayout
    vocab_size: int


def read_served_model(folder: Path) -> ServedModel:
    """Read Qwen-MoE, Mixtral, GLM and DeepSeek style configurations.

    Raises:
        ConfigError: no config, or none of a Mixture-of-Experts model.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError([f"no model: got folder {folder}, expected config.json in it"])
    config = json.loads(file.read_text())
    config = config.get("text_config", config)
    num_experts = _first(config, "num_experts", "n_routed_experts", "num_local_experts")
    moe_top_k = _first(config, "num_experts_per_tok", "num_experts_per_token")
    if num_experts is None or moe_top_k is None:
        raise ConfigError(
            [f"{file}: got no expert count, expected a Mixture-of-Experts model's configuration"]
        )
    layout = RowLayout(
        num_hidden_layers=config["num_hidden_layers"],
        moe_layers=_moe_layers(config),
        num_experts=num_experts,
        moe_top_k=moe_top_k,
    )
    return ServedModel(layout, config["vocab_size"])


def _first(config: dict[str, Any], *names: str) -> int | None:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _moe_layers(config: dict[str, Any]) -> tuple[int, ...]:
    """Global numbers of the layers that have a router."""
    num_layers = config["num_hidden_layers"]
    dense_first = config.get("first_k_dense_replace") or 0
    dense = set(config.get("mlp_only_layers") or ())
    frequency = config.get("moe_layer_freq", config.get("decoder_sparse_step")) or 1
    if isinstance(frequency, list):
        return tuple(layer for layer in range(num_layers) if frequency[layer])
    if "moe_layer_freq" in config:  # DeepSeek counts from layer 0, Qwen from 1
        return tuple(n for n in range(dense_first, num_layers) if n % frequency == 0)
    return tuple(
        layer
        for layer in range(dense_first, num_layers)
        if layer not in dense and (layer + 1) % frequency == 0
    )
