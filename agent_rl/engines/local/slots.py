"""Bookkeeping of KV slots on the host: the session that owns each, and the tokens in it."""

from __future__ import annotations

import heapq
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from agent_rl.types import Rows, TokenIds


class Slot:
    """One session's prefix: the tokens fed so far and the experts chosen for each of them."""

    def __init__(
        self,
        index: int,
        max_tokens: int,
        row_shape: tuple[int, int],
        dtype: np.dtype[np.unsignedinteger],
    ):
        self.index = index
        self.busy = False
        self.length = 0  # positions [0, length) are in the KV storage
        self._tokens: NDArray[np.int32] = np.zeros(max_tokens, dtype=np.int32)
        self._rows: Rows = np.zeros((max_tokens, *row_shape), dtype=dtype)

    def common_prefix(self, token_ids: TokenIds) -> int:
        """Return the number of leading tokens of ``token_ids`` that the slot holds."""
        limit = min(self.length, len(token_ids))
        differs = np.flatnonzero(self._tokens[:limit] != token_ids[:limit])
        return int(differs[0]) if differs.size else limit

    def truncate(self, length: int) -> None:
        """Mutating: forget positions from ``length`` on."""
        self.length = min(self.length, length)

    def extend(self, token_ids: TokenIds, rows: Rows) -> None:
        """Mutating: note that ``token_ids`` ``[S]`` were fed and chose ``rows`` ``[S, L, K]``."""
        end = self.length + len(token_ids)
        self._tokens[self.length : end] = token_ids
        self._rows[self.length : end] = rows
        self.length = end

    def rows(self, start: int, stop: int) -> Rows:
        """Return an owned copy of rows ``[start, stop)``."""
        return self._rows[start:stop].copy()


class SlotTable:
    """Slots by session, the least recently used idle one given away when none is free.

    The lowest free slot is taken first: neighbouring slots batch without a copy.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        max_tokens: int,
        row_shape: tuple[int, int],
        row_dtype: np.dtype[np.unsignedinteger],
    ) -> None:
        slots = [Slot(i, max_tokens, row_shape, row_dtype) for i in range(num_slots)]
        self._free = [(slot.index, slot) for slot in slots]
        self._owned: OrderedDict[str, Slot] = OrderedDict()  # least recently used first
        self.num_evictions = 0

    def __len__(self) -> int:
        return len(self._owned)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._owned

    def acquire(self, session_id: str) -> Slot | None:
        """Mutating: the session's slot, marked busy; None when every slot is busy."""
        slot = self._owned.get(session_id)
        if slot is None:
            if not self._free and not self._evict_idle():
                return None
            slot = heapq.heappop(self._free)[1]
            self._owned[session_id] = slot
        self._owned.move_to_end(session_id)
        slot.busy = True
        return slot

    def release(self, session_id: str) -> None:
        """Mutating: the slot is idle; its prefix stays until evicted or forgotten."""
        self._owned[session_id].busy = False

    def forget(self, session_id: str) -> None:
        """Mutating: free the session's slot. Unknown sessions are ignored."""
        slot = self._owned.pop(session_id, None)
        if slot is not None:
            slot.busy = False
            slot.length = 0
            heapq.heappush(self._free, (slot.index, slot))

    def clear(self) -> None:
        """Mutating: forget every session."""
        for session_id in list(self._owned):
            self.forget(session_id)

    def _evict_idle(self) -> bool:
        for session_id, slot in self._owned.items():
            if not slot.busy:
                self.forget(session_id)
                self.num_evictions += 1
                return True
        return False
