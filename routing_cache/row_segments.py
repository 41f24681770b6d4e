"""Rows by reference: slabs that hold them, segments that point into slabs, and lists of segments.

A slab is written by one session from front to back and never changed afterwards, so readers need
no lock: a segment only ever names rows that were complete when it was made.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from routing_cache.digest import Digests
from routing_cache.layout import Mask, Rows, missing_rows
from routing_cache.provenance import Provenance


class Slab:
    """``rows`` ``[capacity, L, K]`` and their ``digests`` ``[capacity]``, filled from the front."""

    __slots__ = ("__weakref__", "awaited", "digests", "open", "pins", "rows", "spilled", "used")

    def __init__(self, rows: Rows, digests: Digests | None) -> None:
        self.rows = rows
        self.digests = digests
        self.used = 0
        self.pins = 0  # open sessions and leases that need it
        self.awaited = False  # the store reports when the last pin goes
        self.open = True  # a session still appends to it
        self.spilled = False


class Segment(NamedTuple):
    """Rows of tokens ``[start, stop)`` of a sequence, by reference. Immutable."""

    start: int
    stop: int
    slab: Slab
    offset: int  # row index in the slab of token ``start``
    provenance: Provenance
    has_missing: bool  # some row in it, or in the segment it was cut from, may be missing

    @property
    def rows(self) -> Rows:
        """Read-only zero-copy view ``[stop - start, L, K]``."""
        view = self.slab.rows[self.offset : self.offset + self.stop - self.start]
        view.flags.writeable = False
        return view

    @property
    def digests(self) -> Digests | None:
        if self.slab.digests is None:
            return None
        return self.slab.digests[self.offset : self.offset + self.stop - self.start]

    def clip(self, start: int, stop: int) -> Segment:
        """Return the part inside ``[start, stop)``, which must not be empty."""
        if start <= self.start and stop >= self.stop:
            return self
        low, high = max(start, self.start), min(stop, self.stop)
        # Spelt out, because NamedTuple._replace takes ten times as long and this runs per turn.
        offset = self.offset + low - self.start
        return Segment(low, high, self.slab, offset, self.provenance, self.has_missing)


def clip_all(segments: Sequence[Segment], start: int, stop: int) -> list[Segment]:
    """Return the parts of ``segments`` inside ``[start, stop)``; none when that is empty.

    ``segments`` are sorted and free of overlaps. A long conversation has many, and every turn asks
    about its end: the first one is looked up.
    """
    parts: list[Segment] = []
    if start >= stop or not segments or segments[-1].stop <= start:
        return parts
    for index in range(bisect_right(segments, start, key=_stop), len(segments)):
        segment = segments[index]
        if segment.start >= stop:
            break
        parts.append(segment.clip(start, stop))
    return parts


_stop = attrgetter("stop")


def overlay(base: list[Segment], extra: list[Segment]) -> list[Segment]:
    """Fill the gaps of ``base`` from ``extra``; both sorted and free of overlaps."""
    if not base:
        return list(extra)
    result: list[Segment] = []
    position = 0
    for segment in base:
        result += clip_all(extra, position, segment.start)
        result.append(segment)
        position = segment.stop
    result += clip_all(extra, position, max(position, extra[-1].stop if extra else 0))
    return result


def overlay_known(base: list[Segment], extra: list[Segment], missing: int) -> list[Segment]:
    """Fill like :func:`overlay`, missing rows of ``base`` too where ``extra`` knows them."""
    if not extra or not any(s.has_missing for s in base):
        return overlay(base, extra)
    known = _known_parts(base, missing)
    return overlay(overlay(overlay(known, _known_parts(extra, missing)), base), extra)


def _known_parts(segments: list[Segment], missing: int) -> list[Segment]:
    parts: list[Segment] = []
    for segment in segments:
        if not segment.has_missing:
            parts.append(segment)
            continue
        at = segment.start
        runs = true_runs(~missing_rows(segment.rows, missing))
        parts += [segment.clip(at + a, at + b) for a, b in runs]
    return parts


def true_runs(mask: Mask) -> list[tuple[int, int]]:
    """Return ``[start, stop)`` of every run of True in ``mask``."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def contiguous_from(segments: list[Segment], position: int) -> list[Segment]:
    """Return the part of sorted ``segments`` that covers ``position`` onwards without a gap."""
    result: list[Segment] = []
    for segment in segments:
        if segment.stop <= position:
            continue
        if segment.start > position:
            break
        result.append(segment.clip(position, segment.stop))
        position = segment.stop
    return result


def join_neighbours(segments: Iterable[Segment]) -> list[Segment]:
    """Join segments whose rows lie side by side in memory, whoever made them."""
    joined: list[Segment] = []
    for segment in segments:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.slab is segment.slab
            and last.offset + last.stop - last.start == segment.offset
        ):
            has_missing = last.has_missing or segment.has_missing
            joined[-1] = last._replace(stop=segment.stop, has_missing=has_missing)
        else:
            joined.append(segment)
    return joined
