"""Places of a micro-batch's positions on this rank: padded, packed, under CP and SP.

Everything that is laid out goes through the spans of a ``Grid``, so that ids, masks, values and
routing rows cannot end up at different places.

padded   B sequences side by side, all as wide as the longest one
packed   one row; the sequences follow each other (Megatron's thd), so little is padded
context  rank r of c holds chunks r and 2c-1-r of each of a sequence's 2c chunks (zigzag): the
         triangle of causal attention falls evenly on the ranks
sequence rank r of t holds the r-th of t equal runs of columns of what context parallelism left;
         only the routers see that cut, ids and log-probs stay whole within a tensor-parallel group

Axis letters: B grid rows, S local columns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Part:
    """The part of every micro-batch that a rank holds."""

    cp_rank: int = 0
    cp_size: int = 1
    sp_rank: int = 0
    sp_size: int = 1

    @property
    def divisor(self) -> int:
        """The number that the whole width must be a multiple of."""
        return math.lcm(2 * self.cp_size if self.cp_size > 1 else 1, self.cp_size * self.sp_size)


@dataclass(frozen=True)
class Span:
    """A run of positions of one sequence; those behind the sequence's length are padding."""

    sequence: int
    start: int
    stop: int
    row: int
    column: int  # of ``start``

    def clipped(self, first: int, last: int) -> Span:
        """The part in columns ``[first, last)``, columns counted from ``first``."""
        skipped = max(0, first - self.column)
        start = min(self.stop, self.start + skipped)
        column = self.column + skipped - first
        return replace(
            self, start=start, stop=max(start, min(self.stop, start + last - first - column)),
            column=column,
        )  # fmt: skip


@dataclass(frozen=True)
class Grid:
    """One rank's ``[B, S]`` of a micro-batch.

    ``widths`` are the positions of every sequence, padding included, over all ranks; the ones
    behind the last sample are empty and only fill the shape. ``boundaries`` are their cumulated
    sums when the sequences are packed into one row.
    """

    num_rows: int
    width: int
    widths: tuple[int, ...]
    spans: tuple[Span, ...]
    boundaries: tuple[int, ...] | None = None

    def spans_of(self, part: Part) -> Iterator[Span]:
        """Spans in the columns of this sequence-parallel rank, counted from its first column."""
        own = self.width // part.sp_size
        first = part.sp_rank * own
        for span in self.spans:
            clipped = span.clipped(first, first + own)
            if clipped.stop > clipped.start:
                yield clipped


def padded_grid(
    lengths: Sequence[int], part: Part, *, alignment: int = 1, at_least: tuple[int, int] = (1, 1)
) -> Grid:
    """Sequences side by side. ``at_least`` is a (rows, whole width) to fill up to."""
    divisor = math.lcm(alignment, part.divisor)
    width = aligned(max([at_least[1], *lengths]), divisor)
    num_rows = max(at_least[0], len(lengths))
    spans: list[Span] = []
    for row in range(num_rows):
        spans += _zigzag(row, row, 0, width, part)
    return Grid(num_rows, width // part.cp_size, (width,) * num_rows, tuple(spans))


def packed_grid(
    lengths: Sequence[int], part: Part, *, alignment: int = 1, at_least: tuple[int, int] = (1, 1)
) -> Grid:
    """Sequences one behind the other; the last one takes up what the alignment adds.

    Its own padding keeps a sequence divisible by its zigzag chunks.
    """
    chunks = 2 * part.cp_size if part.cp_size > 1 else 1
    widths = [aligned(n, chunks) for n in lengths] or [chunks]
    total = aligned(max(at_least[1], sum(widths)), math.lcm(alignment, part.divisor))
    widths[-1] += total - sum(widths)
    spans: list[Span] = []
    column = 0
    for sequence, width in enumerate(widths):
        spans += _zigzag(sequence, 0, column, width, part)
        column += width // part.cp_size
    boundaries = tuple(itertools.accumulate(widths, initial=0))
    return Grid(1, column, tuple(widths), tuple(spans), boundaries)


def aligned(length: int, alignment: int) -> int:
    """Return ``length`` rounded up to a multiple of ``alignment``, at least one multiple."""
    return max(1, math.ceil(length / alignment)) * alignment


def _zigzag(sequence: int, row: int, column: int, width: int, part: Part) -> list[Span]:
    if part.cp_size == 1:
        return [Span(sequence, 0, width, row, column)]
    chunk = width // (2 * part.cp_size)
    starts = (part.cp_rank * chunk, (2 * part.cp_size - 1 - part.cp_rank) * chunk)
    return [
        Span(sequence, start, start + chunk, row, column + i * chunk)
        for i, start in enumerate(starts)
    ]
