"""Agreement of the live routers with the replayed rows, and the load of the experts.

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
    """Collects the counts of one rank; mutated by ``begin`` and ``add``.

    Sums stay on the routers' device until ``counts`` asks: reading one per layer would make a GPU
    wait for its queue at each.
    """

    def __init__(self, layers: Sequence[int], num_experts: int) -> None:
        self._layers = tuple(layers)
        self._flips = torch.zeros(len(layers), dtype=torch.int64)
        self._load = torch.zeros(len(layers), num_experts, dtype=torch.int64)
        self._flipped: dict[int, torch.Tensor] = {}
        self._tokens = 0

    def begin(self, micro_batch: int, replayed: torch.Tensor) -> None:
        """Expect a micro-batch whose tokens ``replayed [N]`` (on the CPU) have a row.

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
        device = live.device
        self._flips, self._load = self._flips.to(device), self._load.to(device)
        differs = (chosen.sort(dim=1).values != live.sort(dim=1).values).any(dim=1)
        flipped = differs & replayed
        self._flips[slot] += flipped.sum()
        self._flipped[micro_batch] = self._flipped[micro_batch].to(device) | flipped
        real = (~padding).unsqueeze(1).expand_as(chosen)
        self._load[slot].scatter_add_(0, chosen.flatten(), real.flatten().to(torch.int64))

    @property
    def counts(self) -> RoutingCounts:
        flipped = [self._flipped[key].cpu() for key in sorted(self._flipped)]
        joined = torch.cat(flipped) if flipped else torch.zeros(0, dtype=torch.bool)
        return RoutingCounts(
            layers=self._layers,
            flips=self._flips.cpu(),
            load=self._load.cpu(),
            tokens=self._tokens,
            tokens_with_flip=int(joined.sum()),
            flipped=joined,
        )
