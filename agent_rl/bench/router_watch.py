"""The experts that a trainer's routers really used, read from Megatron's own routing maps.

Replay is judged by what the token dispatcher receives, not by what was handed in: every router's
output is caught on its way out, whatever code chose the experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.modules.module import register_module_forward_hook

from agent_rl.trainer import cpu_backend  # noqa: F401  # before megatron: quiet import
from agent_rl.types import TrainSample
from routing_cache import RowLayout

# isort: split
from megatron.core.transformer.moe.router import TopKRouter


class Scorer(Protocol):
    """The part of a trainer that is watched."""

    @property
    def row_layout(self) -> RowLayout: ...

    def score(self, samples: Sequence[TrainSample], replay: Literal["off", "r3"]) -> object: ...


@dataclass(frozen=True)
class UsedSets:
    """(token, layer) sets looked at, and how many were not the recorded ones."""

    num_sets: int
    num_differing: int

    @property
    def flip_rate(self) -> float:
        return self.num_differing / self.num_sets if self.num_sets else 0.0


@contextmanager
def watch_routers() -> Iterator[list[tuple[int, NDArray[np.bool_]]]]:
    """Collect (global layer, routing map ``[N, E]``) of every Megatron router call inside."""
    calls: list[tuple[int, NDArray[np.bool_]]] = []

    def note(module: torch.nn.Module, _: object, output: object) -> None:
        if isinstance(module, TopKRouter):
            assert isinstance(output, tuple)
            assert module.layer_number is not None
            calls.append((module.layer_number - 1, output[1].bool().cpu().numpy()))

    handle = register_module_forward_hook(note)
    try:
        yield calls
    finally:
        handle.remove()


def used_sets(
    trainer: Scorer, samples: Sequence[TrainSample], replay: Literal["off", "r3"]
) -> UsedSets:
    """Score ``samples`` one at a time and compare the sets used with the samples' rows.

    One at a time, because a lone sample's tokens come first in Megatron's order, whatever the
    layout pads or packs.
    """
    layout = trainer.row_layout
    num_sets = num_differing = 0
    for sample in samples:
        assert sample.routed_experts is not None
        rows, present = sample.routed_experts.gather(stop=len(sample.token_ids) - 1)
        wanted = np.zeros((*rows.shape[:2], layout.num_experts), bool)  # [T, L, E]
        np.put_along_axis(wanted, rows.astype(np.int64), values=True, axis=2)
        with watch_routers() as calls:
            trainer.score([sample], replay)
        for layer, used in calls:
            slot = layout.moe_layers.index(layer)
            differs = (used[: len(rows)] != wanted[:, slot]).any(axis=1) & present
            num_sets += int(present.sum())
            num_differing += int(differs.sum())
    return UsedSets(num_sets, num_differing)
