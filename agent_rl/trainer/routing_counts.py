"""How far the live routers agree with the replayed rows, and how the experts are loaded.

Axis letters: L MoE layers, E experts, K experts per token, N local tokens of a micro-batch, M of
all counted micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RoutingCounts:
    """Counts over real tokens; flips only over those with a replayed row."""

    layers: tuple[int, ...]  # global numbers
    flips: torch.Tensor  # [L] int64: tokens whose live set differs from the replayed one
    load: torch.Tensor  # [L, E] int64: tokens sent to each expert
    tokens: int  # with a replayed row
    tokens_with_flip: int  # in any of the layers
    flipped: torch.Tensor  # [M] bool, token by token; False on padding


class RoutingCounter:
    """Collects the counts of one rank; mutated by ``begin`` and ``add``."""

    def __init__(self, layers: Sequence[int], num_experts: int) -> None:
        self._layers = tuple(layers)
        self._flips = torch.zeros(len(layers), dtype=torch.int64)
        self._load = torch.zeros(len(layers), num_experts, dtype=torch.int64)
        self._flipped: dict[int, torch.Tensor] = {}
        self._tokens = 0

    def begin(self, micro_batch: int, replayed: torch.Tensor) -> None:
        """Expect a micro-batch whose tokens ``replayed [N]`` have a row.

        A stage without MoE layers counts its tokens too: all stages then agree on them.
        """
        if micro_batch not in self._flipped:
            self._flipped[micro_batch] = torch.zeros_like(replayed)
            self._tokens += int(replayed.sum())

    def add(
        self,
        micro_batch: int,
        slot: int,
        *,
        chosen: torch.Tensor,
        live: torch.Tensor,
        replayed: torch.Tensor,
        padding: torch.Tensor,
    ) -> None:
        """One layer's sets ``[N, K]``: used ones and live ones; masks ``[N]``."""
        differs = (chosen.sort(dim=1).values != live.sort(dim=1).values).any(dim=1).cpu()
        flipped = differs & replayed
        self._flips[slot] += int(flipped.sum())
        self._flipped[micro_batch] |= flipped
        real = chosen[~padding.to(chosen.device)].flatten()
        self._load[slot] += torch.bincount(real, minlength=self._load.shape[1]).cpu()

    @property
    def counts(self) -> RoutingCounts:
        flipped = [self._flipped[key] for key in sorted(self._flipped)]
        joined = torch.cat(flipped) if flipped else torch.zeros(0, dtype=torch.bool)
        return RoutingCounts(
            layers=self._layers,
            flips=self._flips,
            load=self._load,
            tokens=self._tokens,
            tokens_with_flip=int(joined.sum()),
            flipped=joined,
        )
