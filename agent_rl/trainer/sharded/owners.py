"""The rank that writes a tensor, when several hold the same."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import torch.distributed as dist

from agent_rl.trainer.weights import ParamMap, Slice


class Owners:
    """The writer of every slice; the same answer on every rank.

    Holders of a slice take turns by its name, so replicas share the work. Collective to make.
    """

    def __init__(self, maps: Iterable[ParamMap]) -> None:
        mine = sorted({(s.name, s.index) for m in maps for s in m.slices})
        held: list[list[tuple[str, int]]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(held, mine)
        self._holders: dict[tuple[str, int], list[int]] = {}
        for rank, keys in enumerate(held):
            for key in keys:
                self._holders.setdefault(key, []).append(rank)

    def of(self, part: Slice) -> int:
        """The rank that writes this part."""
        return _turn(part.name, self._holders[part.name, part.index])

    def of_whole(self, parts: Sequence[Slice]) -> int:
        """The rank that writes tensors joined from all their parts: it holds the first of them."""
        first = parts[0]
        return _turn(first.name, self._holders[first.name, 0])


def _turn(name: str, holders: Sequence[int]) -> int:
    return holders[zlib.crc32(name.encode()) % len(holders)]
