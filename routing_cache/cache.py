"""``RoutingCache``: rows of many conversations, shared by token prefix and weight version."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from routing_cache.core import CacheCore
from routing_cache.digest import DEFAULT_KEY
from routing_cache.disagreement import DisagreementCounts
from routing_cache.errors import LayoutError
from routing_cache.layout import RowLayout, as_token_ids
from routing_cache.lease import RowsLease
from routing_cache.persist import open_saved, restore, write_saved
from routing_cache.provenance import ConflictPolicy
from routing_cache.radix_tree import TOKEN_BYTES, Node
from routing_cache.row_index import RowIndex
from routing_cache.row_segments import contiguous_from
from routing_cache.session import Session


class Match(NamedTuple):
    """Result of a lookup: ``num_tokens`` of the query, and rows for its first ``num_rows``."""

    num_tokens: int
    num_rows: int
    weight_versions: tuple[int, ...]  # versions that the rows come from, ascending


@dataclass(frozen=True)
class RetireReport:
    """Outcome of :meth:`RoutingCache.retire`."""

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
        digest: give rows digests when they come in. Off only for measurements.
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
        self.core = CacheCore(
            layout,
            conflict_policy=conflict_policy,
            budget_bytes=budget_bytes,
            spill_dir=spill_dir,
            digest=digest,
            digest_key=digest_key,
        )

    @property
    def layout(self) -> RowLayout:
        return self.core.layout

    @property
    def conflict_policy(self) -> ConflictPolicy:
        return self.core.conflict_policy

    def session(self, weight_version: int, *, engine: str = "local") -> Session:
        """Begin an empty conversation with ``engine`` under ``weight_version``."""
        return Session(self.core, weight_version, engine)

    def match(self, token_ids: object, weight_versions: Collection[int]) -> Match:
        """Find the longest prefix of ``token_ids`` known under ``weight_versions``, and its rows.

        ``token_ids`` is an int32 array, or ``bytes`` of little-endian int32 (fastest).
        """
        key = token_ids if isinstance(token_ids, bytes) else as_token_ids(token_ids).tobytes()
        if len(key) % TOKEN_BYTES:
            raise LayoutError("a key holds whole int32 token ids", got=f"{len(key)} bytes")
        core = self.core
        with core.guard:
            if len(weight_versions) == 1:
                (version,) = weight_versions
                match = _match_one(core, key, version)
            else:
                num_tokens, segments = core.lookup(key, weight_versions)
                known = contiguous_from(segments, 0)
                num_rows = known[-1].stop if known else 0
                versions = sorted({s.provenance.weight_version for s in known})
                match = Match(num_tokens, num_rows, tuple(versions))
            core.counters.lookups += 1
            core.counters.lookup_tokens += match.num_tokens
            core.counters.lookup_rows += match.num_rows
            return match

    def lease(self, token_ids: object, weight_versions: Collection[int]) -> RowsLease:
        """Pin the rows known for ``token_ids``, without a session."""
        key = as_token_ids(token_ids).tobytes()
        with self.core.guard:
            segments = self.core.find_rows(key, weight_versions, 0)
            num_rows = segments[-1].stop if segments else 0
            return RowsLease(
                self.core,
                tuple(segments),
                key[num_rows * TOKEN_BYTES :],
                len(key) // TOKEN_BYTES,
                {s.slab for s in segments},
            )

    def retire(self, *, before: int) -> RetireReport:
        """Drop all versions below ``before`` that no lease or open session holds. Mutates.

        Of a version that is held only the pinned entries stay; a later call takes them.
        """
        core = self.core
        with core.guard:
            core.evictor.wake()
            bytes_before = core.held_bytes
            retired: list[int] = []
            held: list[int] = []
            rows = 0
            for version in sorted(v for v in core.trees if v < before):
                tree = core.trees[version]
                for node in reversed(list(tree.nodes())):
                    if not node.children and node.payload.pinned_slab() is None:
                        rows += core.drop(node)
                if tree.root.children:
                    held.append(version)
                else:
                    retired.append(version)
                    del core.trees[version]
            freed = bytes_before - core.held_bytes
            return RetireReport(tuple(retired), tuple(held), rows, freed)

    def stats(self) -> CacheStats:
        """Return counters, sizes and router disagreement as of now."""
        core = self.core
        return CacheStats(
            row_bytes=core.store.memory_bytes,
            spilled_bytes=core.store.spilled_bytes,
            token_bytes=core.token_bytes,
            index_bytes=core.lru.num_bytes,
            budget_bytes=core.store.budget_bytes,
            num_sessions=len(core.open_sessions),
            num_leases=core.store.num_leases,
            num_nodes=core.lru.num_nodes,
            weight_versions=tuple(sorted(core.trees)),
            spills=core.store.num_spills,
            disagreements=core.disagreements.snapshot(),
            **vars(core.counters),
        )

    def evict(self, num_bytes: int) -> int:
        """Drop least recently used entries that nothing pins until ``num_bytes`` are free.

        Returns the bytes really freed. Mutates.
        """
        return self._free(num_bytes, self.core.evict_one)

    def spill(self, num_bytes: int) -> int:
        """Move completed slabs that leases or sessions need to files; returns the bytes freed.

        Mutates. Needs a ``spill_dir``. Called by the budget; by hand before a large training step.
        """
        return self._free(num_bytes, self.core.store.spill_one)

    def _free(self, num_bytes: int, free_one: Callable[[], bool]) -> int:
        with self.core.guard:
            before = self.core.held_bytes
            while before - self.core.held_bytes < num_bytes and free_one():
                pass
            return before - self.core.held_bytes

    def held_bytes(self) -> int:
        """Return the bytes in memory: rows, digests, tokens and index."""
        return self.core.held_bytes

    def save(self, path: Path) -> int:
        """Write all rows and tokens to ``path`` atomically; returns the size in bytes.

        Open sessions and leases are not saved; what they recorded is.
        """
        return write_saved(self.core, path)

    @staticmethod
    def load(
        path: Path,
        *,
        layout: RowLayout | None = None,
        budget_bytes: int | None = None,
        spill_dir: Path | None = None,
    ) -> RoutingCache:
        """Make a new cache of a file that :meth:`save` wrote.

        Args:
            layout: the model the file must belong to; None takes the file's word.

        Raises:
            CodecError: foreign, truncated or damaged; nothing of it is used.
            LayoutError: rows of another model.
            BudgetError: the file does not fit ``budget_bytes``.
        """
        with open_saved(path, layout) as (index, file):
            cache = RoutingCache(
                index.layout,
                conflict_policy=index.conflict_policy,
                budget_bytes=budget_bytes,
                spill_dir=spill_dir,
                digest=index.with_digests,
                digest_key=index.digest_key,
            )
            restore(cache.core, index, file)
        return cache


def _match_one(core: CacheCore, key: bytes, version: int) -> Match:
    tree = core.trees.get(version)
    if tree is None:
        return Match(0, 0, ())
    deepest, num_tokens = tree.walk(key)
    core.lru.touch(deepest)
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
