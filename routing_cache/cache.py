"""``RoutingCache``: rows of many conversations, shared by token prefix and weight version."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from routing_cache.digest import DEFAULT_KEY, Digester
from routing_cache.errors import ConcurrencyError, LayoutError, RoutingCacheError
from routing_cache.eviction import Evictor
from routing_cache.lease import RowsLease
from routing_cache.row_store import RowStore
from routing_cache.provenance import ConflictPolicy, DisagreementCounts, DisagreementMeter
from routing_cache.radix_tree import TOKEN_BYTES, Node, NodeLru, RadixTree
from routing_cache.layout import RowLayout, as_token_ids
from routing_cache.row_index import RowIndex
from routing_cache.row_segments import Segment, contiguous_from, overlay_known
from routing_cache.session import Session


class Match(NamedTuple):
    """What a lookup found: ``num_tokens`` of the query, and rows for its first ``num_rows``."""

    num_tokens: int
    num_rows: int
    weight_versions: tuple[int, ...]  # versions that the rows come from, ascending


@dataclass(frozen=True)
class RetireReport:
    """What :meth:`RoutingCache.retire` did."""

    retired_versions: tuple[int, ...]  # gone from every lookup
    held_versions: tuple[int, ...]  # partly kept, because leases or open sessions need them
    rows_dropped: int
    bytes_freed: int


@dataclass(frozen=True)
class CacheStats:
    """A snapshot of counters and sizes; counters only grow."""

    row_bytes: int  # rows and digests in memory
    spilled_bytes: int  # rows in files
    token_bytes: int  # token buffers of open sessions
    index_bytes: int  # tree edges and nodes
    budget_bytes: int | None
    num_sessions: int
    num_leases: int
    num_nodes: int
    weight_versions: tuple[int, ...]
    rows_recorded: int  # rows that replies brought
    rows_reused: int  # rows that adopt() found in the tree
    rows_bad: int  # rows refused: ids out of range or repeated
    rows_missing: int  # rows that engines marked as missing
    rows_evicted: int
    replies_without_rows: int
    forks: int  # adopt() calls that left the session's history
    spills: int
    lookups: int
    lookup_tokens: int
    lookup_rows: int
    disagreements: DisagreementCounts

    @property
    def held_bytes(self) -> int:
        """Everything the cache holds in memory."""
        return self.row_bytes + self.token_bytes + self.index_bytes


@dataclass
class Counters:
    """What happened so far; see :class:`CacheStats`."""

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


class _Exclusive:
    """A lock that is never waited for."""

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


class RoutingCache:
    """Routing rows keyed by weight version and token prefix.

    One owner (a thread or an event loop) calls the mutating methods; leases may be read from any
    thread meanwhile. Two threads that mutate at the same moment get ``ConcurrencyError``.

    Args:
        layout: shape of the model's rows.
        conflict_policy: which rows win when a later reply brings other ones for the same tokens:
            ``first`` are those behind the sampled log-probabilities.
        budget_bytes: upper bound of ``stats().held_bytes``; None is no bound.
        spill_dir: where rows that leases need go when the budget is exhausted; None is nowhere.
        digest: whether rows get digests when they come in. Off only for measurements.
        digest_key: key of the digests; processes that exchange rows must agree on it.

    Example:
        >>> cache = RoutingCache(RowLayout(48, tuple(range(48)), 128, 8))
        >>> session = cache.session(weight_version=1)
    """

    def __init__(
        self,
        layout: RowLayout,
        *,
        conflict_policy: ConflictPolicy = "first",
        budget_bytes: int | None = None,
        spill_dir: Path | None = None,
        digest: bool = True,
        digest_key: int = DEFAULT_KEY,
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
        self._trees: dict[int, RadixTree[RowIndex]] = {}
        self._sessions: dict[int, Session] = {}
        self._token_bytes = 0  # of the open sessions
        self._guard = _Exclusive()

    def session(self, weight_version: int, *, engine: str = "local") -> Session:
        """A new, empty conversation with ``engine`` under ``weight_version``."""
        return Session(self, weight_version, engine)

    def match(self, token_ids: object, weight_versions: Collection[int]) -> Match:
        """Longest prefix of ``token_ids`` known under ``weight_versions``, and its rows.

        ``token_ids`` is an int32 array, or ``bytes`` of little-endian int32 (fastest).
        """
        key = token_ids if isinstance(token_ids, bytes) else as_token_ids(token_ids).tobytes()
        if len(key) % TOKEN_BYTES:
            raise LayoutError("a key holds whole int32 token ids", got=f"{len(key)} bytes")
        with self.exclusive():
            if len(weight_versions) == 1:
                (version,) = weight_versions
                match = self._match_one(key, version)
            else:
                num_tokens, segments = self._lookup(key, weight_versions)
                known = contiguous_from(segments, 0)
                num_rows = known[-1].stop if known else 0
                versions = sorted({s.provenance.weight_version for s in known})
                match = Match(num_tokens, num_rows, tuple(versions))
            self.counters.lookups += 1
            self.counters.lookup_tokens += match.num_tokens
            self.counters.lookup_rows += match.num_rows
            return match

    def lease(self, token_ids: object, weight_versions: Collection[int]) -> RowsLease:
        """The rows known for ``token_ids``, pinned, without a session."""
        key = as_token_ids(token_ids).tobytes()
        with self.exclusive():
            segments = self.find_rows(key, weight_versions, 0)
            num_rows = segments[-1].stop if segments else 0
            return RowsLease(
                self.layout,
                tuple(segments),
                key[num_rows * TOKEN_BYTES :],
                len(key) // TOKEN_BYTES,
                self.digester,
                self.store,
                {s.slab for s in segments},
            )

    def retire(self, *, before: int) -> RetireReport:
        """Drop all versions below ``before`` that no lease or open session holds. Mutates.

        Of a version that is held only the pinned entries stay; a later call takes them.
        """
        with self.exclusive():
            self.evictor.wake()
            bytes_before = self.held_bytes()
            retired: list[int] = []
            held: list[int] = []
            rows = 0
            for version in sorted(v for v in self._trees if v < before):
                tree = self._trees[version]
                for node in reversed(list(tree.nodes())):
                    if not node.children and node.payload.pinned_slab() is None:
                        rows += self._drop(node)
                if tree.root.children:
                    held.append(version)
                else:
                    retired.append(version)
                    del self._trees[version]
            freed = bytes_before - self.held_bytes()
            return RetireReport(tuple(retired), tuple(held), rows, freed)

    def stats(self) -> CacheStats:
        """Counters, sizes and router disagreement as of now."""
        return CacheStats(
            row_bytes=self.store.memory_bytes,
            spilled_bytes=self.store.spilled_bytes,
            token_bytes=self._token_bytes,
            index_bytes=self.lru.num_bytes,
            budget_bytes=self.store.budget_bytes,
            num_sessions=len(self._sessions),
            num_leases=self.store.num_leases,
            num_nodes=self.lru.num_nodes,
            weight_versions=tuple(sorted(self._trees)),
            spills=self.store.num_spills,
            disagreements=self.disagreements.snapshot(),
            **vars(self.counters),
        )

    def evict(self, num_bytes: int) -> int:
        """Drop least recently used entries that nothing pins until ``num_bytes`` are free.

        Returns the bytes really freed. Mutates.
        """
        with self.exclusive():
            before = self.held_bytes()
            while before - self.held_bytes() < num_bytes and self._evict_one():
                pass
            return before - self.held_bytes()

    def spill(self, num_bytes: int) -> int:
        """Move completed slabs that leases or sessions need to files; returns the bytes freed.

        Mutates. Needs a ``spill_dir``. Called by the budget; by hand before a large training step.
        """
        with self.exclusive():
            before = self.held_bytes()
            while before - self.held_bytes() < num_bytes and self.store.spill_one():
                pass
            return before - self.held_bytes()

    def held_bytes(self) -> int:
        """Bytes in memory: rows, digests, tokens and index."""
        return self.store.memory_bytes + self._token_bytes + self.lru.num_bytes

    def save(self, path: Path) -> int:
        """Write all rows and tokens to ``path`` atomically; returns the size in bytes."""
        from routing_cache.persist import save

        return save(self, path)

    @staticmethod
    def load(
        path: Path,
        *,
        layout: RowLayout | None = None,
        budget_bytes: int | None = None,
        spill_dir: Path | None = None,
    ) -> RoutingCache:
        """A new cache with what :meth:`save` wrote; see :func:`routing_cache.persist.load`."""
        from routing_cache.persist import load

        return load(path, layout=layout, budget_bytes=budget_bytes, spill_dir=spill_dir)

    # For sessions, save and load.

    def exclusive(self) -> _Exclusive:
        """Guard of the mutating methods: refuses a second thread instead of corrupting the tree."""
        return self._guard

    def tree(self, version: int) -> RadixTree[RowIndex]:
        """The tree of one weight version, made on first use."""
        tree = self._trees.get(version)
        if tree is None:
            tree = self._trees[version] = RadixTree(RowIndex, self.lru)
        return tree

    def trees(self) -> list[tuple[int, RadixTree[RowIndex]]]:
        """(weight version, tree), ascending."""
        return sorted(self._trees.items())

    def find_rows(self, key: bytes, versions: Collection[int], start: int) -> list[Segment]:
        """Rows from ``start`` on, contiguous, known for ``key``."""
        _, segments = self._lookup(key, versions)
        return contiguous_from(segments, start)

    def reserve(self, num_bytes: int) -> None:
        """Make room for ``num_bytes`` more; raises ``BudgetError``."""
        self.store.reserve(
            num_bytes, lambda: self._token_bytes + self.lru.num_bytes, self._evict_one
        )

    def note_session(self, session: Session) -> None:
        """Put an open session on the bill."""
        self._sessions[id(session)] = session
        self._token_bytes += session.token_bytes - session.billed_bytes
        session.billed_bytes = session.token_bytes

    def forget_session(self, session: Session) -> None:
        if self._sessions.pop(id(session), None) is not None:
            self._token_bytes -= session.billed_bytes
            session.billed_bytes = 0

    def _match_one(self, key: bytes, version: int) -> Match:
        tree = self._trees.get(version)
        if tree is None:
            return Match(0, 0, ())
        deepest, num_tokens = tree.walk(key)
        self.lru.touch(deepest)
        # Climb to the last node whose whole prefix is known, then count rows on the way down.
        node = deepest
        unsure: list[Node[RowIndex]] = []
        while node.parent is not None and not node.payload.prefix_known:
            unsure.append(node)
            node = node.parent
        num_rows = node.end
        for step in reversed(unsure):
            num_rows = step.payload.known_until(num_rows)
            if num_rows < step.end:
                break
            step.payload.prefix_known = True
        num_rows = min(num_rows, num_tokens)
        return Match(num_tokens, num_rows, (version,) if num_rows else ())

    def _lookup(self, key: bytes, versions: Collection[int]) -> tuple[int, list[Segment]]:
        """Tokens matched under any version, and rows merged in the policy's order."""
        best = 0
        merged: list[Segment] = []
        for version in sorted(versions, reverse=self.conflict_policy == "latest"):
            tree = self._trees.get(version)
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

    def _evict_one(self) -> bool:
        node = self.evictor.next_leaf()
        if node is None:
            return False
        self.counters.rows_evicted += self._drop(node)
        return True

    def _drop(self, node: Node[RowIndex]) -> int:
        rows = sum(s.stop - s.start for s in node.payload.segments)
        node.payload.segments = []
        self.lru.remove(node)
        return rows
