"""Content of a tree node: the row segments of its tokens, possibly with gaps."""

from __future__ import annotations

from routing_cache.provenance import ConflictPolicy
from routing_cache.row_segments import Segment, Slab, overlay_known


class RowIndex:
    """Sorted, non-overlapping segments inside one node's token range."""

    __slots__ = ("prefix_known", "segments")

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        # Set once every row from the root to this node's end was seen to be known. It stays true
        # until the node grows: rows are replaced, but never taken away.
        self.prefix_known = False

    def split(self, at: int) -> RowIndex:
        """Keep rows before token ``at``; return the rest. Mutates."""
        rest = RowIndex()
        rest.prefix_known = self.prefix_known
        rest.segments = [s.clip(at, s.stop) for s in self.segments if s.stop > at]
        self.segments = [s.clip(s.start, at) for s in self.segments if s.start < at]
        return rest

    def grow(self) -> None:
        """Note that the node has new tokens, whose rows are not known yet. Mutates."""
        self.prefix_known = False

    def put(self, segments: list[Segment], policy: ConflictPolicy, missing: int) -> None:
        """Add sorted ``segments``; where rows were known already, ``policy`` decides. Mutates.

        A known row never gives way to a missing one.
        """
        if not segments:
            return
        if not self.segments or self.segments[-1].stop <= segments[0].start:
            self.segments.extend(segments)
        elif policy == "first":
            self.segments = overlay_known(self.segments, segments, missing)
        else:
            self.segments = overlay_known(segments, self.segments, missing)

    def known_until(self, position: int) -> int:
        """Return the end of the rows that follow ``position`` without a gap."""
        for segment in self.segments:
            if segment.start > position:
                break
            position = max(position, segment.stop)
        return position

    def pinned_slab(self) -> Slab | None:
        """Return a slab in here that an open session or a lease needs; None without any."""
        return next((s.slab for s in self.segments if s.slab.pins), None)
