"""Token ranges of a context-parallel rank, and their rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from routing_cache.errors import RowCountError
from routing_cache.layout import Mask, RowLayout, Rows


class Gatherable(Protocol):
    """A source of rows: a lease, array rows, a packed sample."""

    @property
    def layout(self) -> RowLayout: ...

    @property
    def num_tokens(self) -> int: ...

    def gather(
        self, *, layers: Sequence[int] | None = None, start: int = 0, stop: int | None = None
    ) -> tuple[Rows, Mask]: ...


def zigzag_ranges(num_tokens: int, rank: int, size: int) -> tuple[tuple[int, int], ...]:
    """Return the token ranges of context-parallel ``rank`` of ``size``.

    The (padded) sequence is cut into ``2 * size`` chunks; a rank has chunk ``rank`` and its mirror
    ``2 * size - 1 - rank``, which balances causal attention (Megatron-core's layout).

    Raises:
        RowCountError: ``num_tokens`` is no multiple of ``2 * size``, or an impossible rank.
    """
    if not 0 <= rank < size:
        raise RowCountError("no such rank", got=rank, expected=f"0 to {size - 1}")
    if size == 1:
        return ((0, num_tokens),)
    if num_tokens % (2 * size):
        raise RowCountError(
            "the sequence does not divide into zigzag chunks",
            got=num_tokens,
            expected=f"a multiple of {2 * size}",
            fix="pad it first",
        )
    chunk = num_tokens // (2 * size)
    mirror = 2 * size - 1 - rank
    return (rank * chunk, (rank + 1) * chunk), (mirror * chunk, (mirror + 1) * chunk)


def gather_ranges(
    source: Gatherable,
    ranges: Sequence[tuple[int, int]],
    *,
    layers: Sequence[int] | None = None,
) -> tuple[Rows, Mask]:
    """Gather the rows of several token ranges, one behind the other: ``[sum, len(layers), K]``.

    Ranges may reach past the sequence, as padding does; those rows hold the missing mark.
    """
    width = source.layout.num_moe_layers if layers is None else len(layers)
    num_rows = sum(stop - start for start, stop in ranges)
    shape = (num_rows, width, source.layout.moe_top_k)
    rows = np.full(shape, source.layout.missing, source.layout.dtype)
    present = np.zeros(num_rows, np.bool_)
    at = 0
    for start, stop in ranges:
        end = min(stop, source.num_tokens)
        if start < end:
            part, known = source.gather(layers=layers, start=start, stop=end)
            rows[at : at + end - start] = part
            present[at : at + end - start] = known
        at += stop - start
    return rows, present
