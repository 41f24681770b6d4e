"""A snapshot of a session's rows that keeps them alive until it is given back."""

from __future__ import annotations

from routing_cache.core import CacheCore
from routing_cache.errors import ClosedError
from routing_cache.row_segments import Segment, Slab
from routing_cache.sequence_rows import SegmentRows


class RowsLease(SegmentRows):
    """Rows of one sequence, pinned. Nothing it needs is evicted before :meth:`release`.

    Gathers and checks may run in any thread, also while the session goes on.
    """

    def __init__(
        self,
        core: CacheCore,
        segments: tuple[Segment, ...],
        tail_tokens: bytes,
        num_tokens: int,
        slabs: set[Slab],
    ) -> None:
        super().__init__(core.layout, segments, tail_tokens, num_tokens, core.digester)
        self._store = core.store
        self._released = False
        # Emptied by the first release: popping is atomic, so two threads cannot both give back.
        self._held = [slabs]
        self._store.pin(slabs, num_leases=1)

    @property
    def is_released(self) -> bool:
        return self._released

    def release(self) -> None:
        """Give the rows back; they may then be evicted. Idempotent, any thread."""
        try:
            slabs = self._held.pop()
        except IndexError:
            return
        self._released = True
        self._store.unpin(slabs, num_leases=1)
        self._segments, self._joined = (), []

    def __enter__(self) -> RowsLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _check_usable(self) -> None:
        if self._released:
            raise ClosedError("this lease was released", fix="gather before release()")
