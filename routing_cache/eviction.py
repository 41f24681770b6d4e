"""Order of eviction: the least recently used leaf that no session or lease needs goes next."""

from __future__ import annotations

import weakref

from routing_cache.radix_tree import Node, NodeLru
from routing_cache.row_index import RowIndex
from routing_cache.row_segments import Slab
from routing_cache.row_store import RowStore


class Evictor:
    """Chooser of the next leaf; sets pinned ones aside, so that each is looked at once per pin.

    Pins go in any thread; the order of the leaves is changed by the cache's owner alone, who asks
    the store which slabs became free.
    """

    def __init__(self, lru: NodeLru[RowIndex], store: RowStore) -> None:
        self._lru = lru
        self._store = store
        # Weak, because nodes may be put back and dropped while their old slab is still pinned.
        self._aside: weakref.WeakKeyDictionary[Slab, weakref.WeakSet[Node[RowIndex]]] = (
            weakref.WeakKeyDictionary()
        )

    def next_leaf(self) -> Node[RowIndex] | None:
        """Return the leaf to evict; None when sessions and leases need them all."""
        while True:
            self.wake()
            node = self._lru.oldest()
            if node is None:
                return None
            slab = node.payload.pinned_slab()
            if slab is None:
                return node
            # False when another thread gave the pin back just now: look again.
            if self._store.await_unpin(slab):
                self._lru.set_aside(node)
                self._aside.setdefault(slab, weakref.WeakSet()).add(node)

    def wake(self) -> None:
        """Put leaves whose slab became free back into the order."""
        for slab in self._store.take_unpinned():
            for node in self._aside.pop(slab, ()):
                self._lru.enqueue(node)
