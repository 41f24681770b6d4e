"""The state that a cache shares with its sessions and its saved form.

Layout, row store, one tree per weight version, counters and the guard against a second owner. It
knows nothing of those who use it: ``cache``, ``session`` and ``persist`` all take it.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from routing_cache.digest import Digester
from routing_cache.disagreement import DisagreementMeter
from routing_cache.errors import BudgetError, ConcurrencyError, RoutingCacheError
from routing_cache.eviction import Evictor
from routing_cache.layout import RowLayout
from routing_cache.provenance import ConflictPolicy
from routing_cache.radix_tree import Node, NodeLru, RadixTree
from routing_cache.row_index import RowIndex
from routing_cache.row_segments import Segment, contiguous_from, overlay_known
from routing_cache.row_store import RowStore


@dataclass
class Counters:
    """Events so far; :class:`~routing_cache.cache.CacheStats` says what each counts."""

    rows_recorded: int = 0
    rows_reused: int = 0
    rows_bad: int = 0
    rows_missing: int = 0
    rows_evicted: int = 0
    replies_without_rows: int = 0
    forks: int = 0
    lookups: int = 0
    lookup_tokens: int = 0
    lookup_rows: int = 0


class OwnerGuard:
    """A lock that is never waited for: a second thread is refused, so no tree is corrupted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise ConcurrencyError(
                "two threads use one RoutingCache at the same time",
                fix="keep it to one owner; only leases may be read from other threads",
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class CacheCore:
    """Rows keyed by weight version and token prefix; arguments as of ``RoutingCache``."""

    def __init__(
        self,
        layout: RowLayout,
        *,
        conflict_policy: ConflictPolicy,
        budget_bytes: int | None,
        spill_dir: Path | None,
        digest: bool,
        digest_key: int,
    ) -> None:
        if conflict_policy not in ("first", "latest"):
            raise RoutingCacheError(
                "unknown conflict_policy", got=repr(conflict_policy), expected="'first' or 'latest'"
            )
        if budget_bytes is not None and budget_bytes <= 0:
            raise RoutingCacheError("budget_bytes must be positive", got=budget_bytes)
        self.layout = layout
        self.conflict_policy: ConflictPolicy = conflict_policy
        self.digester = Digester(layout, digest_key)
        self.store = RowStore(
            layout, budget_bytes=budget_bytes, spill_dir=spill_dir, with_digests=digest
        )
        self.lru: NodeLru[RowIndex] = NodeLru()
        self.evictor = Evictor(self.lru, self.store)
        self.counters = Counters()
        self.disagreements = DisagreementMeter(layout.num_moe_layers)
        self.guard = OwnerGuard()
        self.trees: dict[int, RadixTree[RowIndex]] = {}  # by weight version
        self.token_bytes = 0  # of the open sessions together
        self.open_sessions: dict[object, int] = {}  # and the token bytes of each

    def tree(self, version: int) -> RadixTree[RowIndex]:
        """Return the tree of one weight version, made on first use."""
        tree = self.trees.get(version)
        if tree is None:
            tree = self.trees[version] = RadixTree(RowIndex, self.lru)
        return tree

    def lookup(self, key: bytes, versions: Collection[int]) -> tuple[int, list[Segment]]:
        """Return tokens matched under any version, and rows merged in the policy's order."""
        best = 0
        merged: list[Segment] = []
        for version in sorted(versions, reverse=self.conflict_policy == "latest"):
            tree = self.trees.get(version)
            if tree is None:
                continue
            node, num_tokens = tree.walk(key)
            best = max(best, num_tokens)
            path = tree.path(node)
            segments = [s for step in path for s in step.payload.segments]
            if segments and segments[-1].stop > num_tokens:
                segments = [s.clip(0, num_tokens) for s in segments if s.start < num_tokens]
            merged = overlay_known(merged, segments, self.layout.missing)
            self.lru.touch(node)
        return best, merged

    def find_rows(self, key: bytes, versions: Collection[int], start: int) -> list[Segment]:
        """Return the rows known for ``key`` from ``start`` on, up to the first gap."""
        return contiguous_from(self.lookup(key, versions)[1], start)

    @property
    def held_bytes(self) -> int:
        """Bytes in memory: rows, digests, tokens and index."""
        return self.store.memory_bytes + self.token_bytes + self.lru.num_bytes

    def reserve(self, num_bytes: int) -> None:
        """Make room for ``num_bytes``: evict while that helps, then spill, else refuse. Mutates.

        Raises:
            BudgetError: everything left is needed and may not, or can not, go to a file.
        """
        budget = self.store.budget_bytes
        while budget is not None and (over := self.held_bytes + num_bytes - budget) > 0:
            if not self.evict_one() and not self.store.spill_one():
                raise BudgetError(
                    "no room for new rows: what is left is held by open sessions and leases",
                    got=f"{over} bytes too many (+{num_bytes} asked)",
                    expected=f"budget_bytes={budget}",
                    fix="release leases, close sessions, raise budget_bytes"
                    + ("" if self.store.spill_dir else " or set spill_dir"),
                )

    def evict_one(self) -> bool:
        """Drop the least recently used leaf that nothing pins; False without any. Mutates."""
        node = self.evictor.next_leaf()
        if node is None:
            return False
        self.counters.rows_evicted += self.drop(node)
        return True

    def drop(self, node: Node[RowIndex]) -> int:
        """Cut a leaf off its tree and return its number of rows. Mutates."""
        rows = sum(s.stop - s.start for s in node.payload.segments)
        node.payload.segments = []
        self.lru.remove(node)
        return rows

    def bill(self, session: object, num_bytes: int) -> None:
        """Count ``num_bytes`` of tokens for an open session, in place of what it had. Mutates."""
        self.token_bytes += num_bytes - self.open_sessions.get(session, 0)
        self.open_sessions[session] = num_bytes

    def forget(self, session: object) -> None:
        """Take a session that closes off the bill. Mutates."""
        self.token_bytes -= self.open_sessions.pop(session, 0)
