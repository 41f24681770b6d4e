"""Store of slabs: allocation inside a byte budget, pins, and spilling to files.

Freed memory is noticed through weak references to the arrays themselves, so a zero-copy view that
someone still holds stays on the bill.
"""

from __future__ import annotations

import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routing_cache.digest import Digests
from routing_cache.errors import BudgetError
from routing_cache.layout import RowLayout, Rows
from routing_cache.provenance import Provenance
from routing_cache.row_segments import Segment, Slab

# From 4 MiB on numpy asks the kernel for huge pages, which reads of a whole trajectory feel.
_FULL_SLAB_BYTES = 4 << 20
# A session that has written this much gets full slabs; before, its slabs double.
_BIG_SESSION_BYTES = 1 << 20
_TRIM_BELOW = 0.97  # a completed slab filled less than this is copied into a smaller one


class ByteMeter:
    """Bytes of the tracked arrays that are still alive, whoever keeps them alive."""

    def __init__(self) -> None:
        self._bytes = 0
        self._next = 0
        self._references: dict[int, weakref.ref[NDArray[Any]]] = {}
        # Arrays may die in any thread; appending to a deque is atomic, subtracting is not.
        self._freed: deque[tuple[int, int]] = deque()

    def track(self, array: NDArray[Any]) -> None:
        """Count ``array`` until it is garbage."""
        ticket, num_bytes, freed = self._next, array.nbytes, self._freed
        self._next += 1
        self._bytes += num_bytes

        def gone(_: weakref.ref[NDArray[Any]]) -> None:
            freed.append((ticket, num_bytes))

        self._references[ticket] = weakref.ref(array, gone)

    @property
    def num_bytes(self) -> int:
        while self._freed:
            ticket, num_bytes = self._freed.popleft()
            del self._references[ticket]
            self._bytes -= num_bytes
        return self._bytes


class RowStore:
    """Slabs inside a byte budget: allocates, pins what is needed, and spills to files."""

    def __init__(
        self,
        layout: RowLayout,
        *,
        budget_bytes: int | None,
        spill_dir: Path | None,
        with_digests: bool,
    ) -> None:
        self.layout = layout
        self.budget_bytes = budget_bytes
        self.with_digests = with_digests
        self.spill_dir = spill_dir
        self._memory = ByteMeter()
        self._files = ByteMeter()
        self._lock = threading.Lock()
        self._slabs: weakref.WeakSet[Slab] = weakref.WeakSet()
        self._unpinned: deque[Slab] = deque()
        self.num_spills = 0
        self.num_leases = 0

    @property
    def slab_row_bytes(self) -> int:
        """Bytes that one row costs in a slab."""
        return self.layout.row_bytes + (8 if self.with_digests else 0)

    @property
    def memory_bytes(self) -> int:
        """Bytes of rows and digests in memory."""
        return self._memory.num_bytes

    @property
    def spilled_bytes(self) -> int:
        """Bytes of rows in files."""
        return self._files.num_bytes

    def allocate(self, num_rows: int) -> Slab:
        """Make an open slab for ``num_rows`` rows. Reserve the bytes first."""
        shape = (num_rows, self.layout.num_moe_layers, self.layout.moe_top_k)
        digests = np.empty(num_rows, np.uint64) if self.with_digests else None
        return self._new_slab(np.empty(shape, self.layout.dtype), digests)

    def adopt_array(
        self,
        flat: NDArray[np.unsignedinteger],
        digests: Digests | None,
        shape: tuple[int, int, int],
    ) -> Slab:
        """Make a full, closed slab of existing arrays (flat canonical rows); counts them."""
        slab = self._new_slab(flat, digests)
        slab.rows, slab.used, slab.open = flat.reshape(shape), shape[0], False
        return slab

    def _new_slab(self, rows: Rows, digests: Digests | None) -> Slab:
        for array in (rows,) if digests is None else (rows, digests):
            self._memory.track(array)
        slab = Slab(rows, digests)
        self._slabs.add(slab)
        return slab

    def pin(self, slabs: Iterable[Slab], *, num_leases: int = 0) -> None:
        """Keep ``slabs`` for an open session, or for a lease (``num_leases=1``)."""
        with self._lock:
            self.num_leases += num_leases
            for slab in slabs:
                slab.pins += 1

    def unpin(self, slabs: Iterable[Slab], *, num_leases: int = 0) -> None:
        """Give pins back; any thread."""
        with self._lock:
            self.num_leases -= num_leases
            for slab in slabs:
                slab.pins -= 1
                if slab.awaited and not slab.pins:
                    slab.awaited = False
                    self._unpinned.append(slab)

    def await_unpin(self, slab: Slab) -> bool:
        """Have ``slab`` reported by :meth:`take_unpinned` later; False when nothing pins it."""
        with self._lock:
            slab.awaited = slab.pins > 0
            return slab.awaited

    def take_unpinned(self) -> Iterator[Slab]:
        """Yield awaited slabs whose last pin went since the last call."""
        while self._unpinned:
            yield self._unpinned.popleft()

    def trim(self, slab: Slab) -> None:
        """Give back what a completed slab never used. Segments see the copy from now on."""
        if slab.used >= _TRIM_BELOW * len(slab.rows):
            return
        rows = slab.rows[: slab.used].copy()
        self._memory.track(rows)
        slab.rows = rows
        if slab.digests is not None:
            digests = slab.digests[: slab.used].copy()
            self._memory.track(digests)
            slab.digests = digests

    def spill_one(self) -> bool:
        """Move the largest completed slab to a file, pinned ones first; False without any."""
        if self.spill_dir is None:
            return False
        candidates = [s for s in self._slabs if not s.open and not s.spilled and s.used]
        if not candidates:
            return False
        # One that nothing pins goes too: it can lie above a pinned node, where it is not evicted.
        self.spill(max(candidates, key=lambda slab: (slab.pins > 0, slab.rows.nbytes)))
        return True

    def spill(self, slab: Slab) -> None:
        """Replace a completed slab's rows by a read-only mapping of a nameless file.

        Readers that took the array before go on with it; segments see the mapping. The file is
        unlinked at once, so that not even a killed process leaves it behind.

        Raises:
            BudgetError: the file could not be written; the slab stays in memory.
        """
        assert self.spill_dir is not None
        used = np.ascontiguousarray(slab.rows[: slab.used])
        try:
            self.spill_dir.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.spill_dir, suffix=".rows") as file:
                file.write(used.data)
                file.flush()
                mapped = np.memmap(file.name, dtype=used.dtype, mode="r", shape=used.shape)
        except OSError as error:
            raise BudgetError(
                f"no room for new rows, and spilling failed: {error}",
                got=f"{used.nbytes} bytes for {self.spill_dir}",
                fix="free disk space, or release leases and close sessions",
            ) from error
        self._files.track(mapped)
        # A plain attribute store: a reader sees the old array or the new one, both complete.
        slab.rows = mapped
        slab.spilled = True
        self.num_spills += 1


class SlabWriter:
    """Writer of one session's rows into slabs that grow with the session."""

    def __init__(self, store: RowStore) -> None:
        self._store = store
        self._slab: Slab | None = None
        self._written = 0

    def bytes_needed(self, num_rows: int) -> int:
        """Count the bytes that :meth:`append` would allocate for ``num_rows`` more rows."""
        missing_rows = num_rows - self._room
        return self._capacity(missing_rows) * self._store.slab_row_bytes if missing_rows > 0 else 0

    @property
    def _room(self) -> int:
        return 0 if self._slab is None else len(self._slab.rows) - self._slab.used

    def _capacity(self, num_rows: int) -> int:
        written_bytes = (self._written + num_rows) * self._store.layout.row_bytes
        if written_bytes >= _BIG_SESSION_BYTES:
            return max(num_rows, -(-_FULL_SLAB_BYTES // self._store.layout.row_bytes))
        return max(num_rows, self._written)

    def append(
        self,
        rows: Rows,
        digests: Digests | None,
        *,
        start: int,
        provenance: Provenance,
        has_missing: bool,
        more_rows: int = 0,
    ) -> list[Segment]:
        """Copy ``rows`` ``[T, L, K]`` for tokens from ``start``; ``more_rows`` will follow."""
        segments: list[Segment] = []
        done = 0
        while done < len(rows):
            if self._room == 0:
                self.seal()
                self._slab = self._store.allocate(self._capacity(len(rows) - done + more_rows))
            slab = self._slab
            assert slab is not None
            count = min(self._room, len(rows) - done)
            slab.rows[slab.used : slab.used + count] = rows[done : done + count]
            if slab.digests is not None and digests is not None:
                slab.digests[slab.used : slab.used + count] = digests[done : done + count]
            segments.append(
                Segment(
                    start + done, start + done + count, slab, slab.used, provenance, has_missing
                )
            )
            slab.used += count
            done += count
        self._written += len(rows)
        return segments

    def seal(self) -> None:
        """Close the current slab to more rows; it may be spilled from now on."""
        if self._slab is not None:
            self._slab.open = False
            self._store.trim(self._slab)
            self._slab = None
