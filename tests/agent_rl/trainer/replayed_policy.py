"""A small model with replay in its routers, and rows to replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from agent_rl.config.schema import TrainerConfig
from agent_rl.model.config_json import read_shape
from agent_rl.model.folders import read_folder
from agent_rl.trainer import cpu_backend
from agent_rl.trainer.model import build_model, transformer_config
from agent_rl.trainer.param_maps import param_maps
from agent_rl.trainer.router_replay import ReplayTable, RouterReplay
from agent_rl.trainer.weights import export_like, load_weights

EXPERTS, TOP_K = 32, 4


class Policy:
    """A model, its replay and a forward of ``[B, S]`` ids."""

    def __init__(self, folder: Path, recompute: str = "none", **model_options: Any) -> None:
        self.shape = read_shape(folder)
        config = transformer_config(self.shape, TrainerConfig(num_threads=1, recompute=recompute))
        for name, value in model_options.items():
            setattr(config, name, value)
        self.model = build_model(self.shape, config)
        self.maps = param_maps(self.model, self.shape)
        load_weights(self.maps, read_folder(folder))
        self.replay = RouterReplay([self.model], num_experts=EXPERTS, recompute=recompute != "none")

    def plain(self, ids: torch.Tensor) -> torch.Tensor:
        with cpu_backend.quiet():
            return self.model(ids, torch.arange(ids.shape[1]).expand(*ids.shape), None)

    def forward(self, micro_batch: int, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        with self.replay.forward(micro_batch, **options):
            out = self.plain(ids)
        self.replay.bind_backward(out, micro_batch)
        return out

    def gradients(self) -> dict[str, torch.Tensor]:
        return export_like(self.maps, lambda p: p.grad)


def backward(loss: torch.Tensor) -> None:
    with cpu_backend.quiet():  # a recomputed forward runs in here
        loss.backward()


def some_ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 200, (batch, length), generator=torch.Generator().manual_seed(seed))


def table(
    rows: torch.Tensor, missing: tuple[int, ...] = (), pads: tuple[int, ...] = ()
) -> ReplayTable:
    present = torch.ones(rows.shape[1], dtype=torch.bool)
    padding = torch.zeros(rows.shape[1], dtype=torch.bool)
    present[list(missing) + list(pads)] = False
    padding[list(pads)] = True
    return ReplayTable(rows.to(torch.uint8), present, padding)


def random_table(num_layers: int, num_tokens: int, seed: int, **kwargs: Any) -> ReplayTable:
    noise = torch.rand(
        num_layers, num_tokens, EXPERTS, generator=torch.Generator().manual_seed(seed)
    )
    return table(noise.topk(TOP_K).indices, **kwargs)


def record(policy: Policy, ids: torch.Tensor) -> torch.Tensor:
    """The live choice ``[L, N, K]``."""
    layers = len(policy.replay.layers)
    nothing = random_table(layers, ids.numel(), 0, missing=tuple(range(ids.numel())))
    with policy.replay.step():
        policy.replay.put(0, nothing)
        policy.forward(0, ids, record=True)
        return policy.replay.recorded(0)
