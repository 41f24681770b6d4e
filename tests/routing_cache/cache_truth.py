"""Rows that are a function of version and prefix, and a check of everything a cache holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from routing_cache import RoutingCache, RowLayout, RowsLease
from routing_cache.layout import Rows
from routing_cache.radix_tree import TOKEN_BYTES, Node
from routing_cache.row_index import RowIndex
from routing_cache.row_segments import Slab

LAYOUT = RowLayout(num_hidden_layers=3, moe_layers=(1, 2), num_experts=16, moe_top_k=2)
TOY = RowLayout(num_hidden_layers=4, moe_layers=(1, 2, 3), num_experts=8, moe_top_k=2)


def true_row(version: int, prefix: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The row of the prefix's last token under ``version``, as a causal model gives it. [L, K]"""
    digest = hash((version, prefix)) & 0xFFFFFFFF  # of integers: the same in every process
    pairs = []
    for layer in range(LAYOUT.num_moe_layers):
        first, step = digest >> 12 * layer & 15, digest >> 12 * layer + 4 & 255
        pairs.append((first, (first + 1 + step % 15) % 16))
    return tuple(pairs)


def true_rows(version: int, tokens: tuple[int, ...], start: int, stop: int) -> Rows:
    """Rows ``[start, stop)`` of ``tokens``. [stop-start, L, K]"""
    rows = [true_row(version, tokens[: p + 1]) for p in range(start, stop)]
    return np.array(rows, np.uint8).reshape(stop - start, LAYOUT.num_moe_layers, 2)


def random_rows(rng: np.random.Generator, num_rows: int, layout: RowLayout) -> Rows:
    """Valid rows, K distinct ids a set. [num_rows, L, K]"""
    shape = (num_rows, layout.num_moe_layers, layout.num_experts)
    order = np.argsort(rng.random(shape), axis=2)
    return order[:, :, : layout.moe_top_k].astype(layout.dtype)


def check_integrity(
    cache: RoutingCache, leases: Iterable[RowsLease] | None = None, *, rows_are_true: bool = True
) -> None:
    """Every invariant of trees, segments, byte counts and pins; the rows against the truth.

    With ``leases``, all that are open, the pins must be exactly theirs and the sessions'.
    """
    num_nodes = edge_bytes = 0
    leaves = set()
    for version, tree in cache.core.trees.items():
        check_recent_child(tree.root)
        for node in tree.nodes():
            check_recent_child(node)
            num_nodes += 1
            edge_bytes += len(node.edge)
            if not node.children:
                leaves.add(node)
            assert node.parent is not None
            assert node.edge
            assert node.start == node.parent.end
            assert node.parent.children[node.edge[:TOKEN_BYTES]] is node
            tokens = tuple(np.frombuffer(key_of(node), np.int32).tolist())
            position = node.start
            for segment in node.payload.segments:
                assert position <= segment.start < segment.stop <= node.end
                position = segment.stop
                assert segment.provenance.weight_version == version
                assert segment.offset + segment.stop - segment.start <= segment.slab.used
                rows = segment.rows
                assert segment.has_missing or not (rows == LAYOUT.missing).any()
                if rows_are_true:
                    expected = true_rows(version, tokens, segment.start, segment.stop)
                    np.testing.assert_array_equal(rows, expected)
            if node.payload.prefix_known:
                for step in tree.path(node):
                    assert step.payload.known_until(step.start) == step.end
    assert cache.core.lru.num_nodes == num_nodes
    assert cache.core.lru.edge_bytes == edge_bytes
    check_order_of_eviction(cache, leaves)
    check_pins_and_bytes(cache, leases)


def key_of(node: Node[RowIndex]) -> bytes:
    """Return the whole key from the root to the end of ``node``."""
    return key_of(node.parent) + node.edge if node.parent is not None else b""


def check_recent_child(node: Node[RowIndex]) -> None:
    """A child that was split or evicted is no longer the one a walk tries first."""
    recent = node.recent
    assert recent is None or node.children[recent.edge[:TOKEN_BYTES]] is recent


def check_order_of_eviction(cache: RoutingCache, leaves: set[Node[RowIndex]]) -> None:
    """Every leaf stands in the order once, or waits for a slab that is pinned or just came free."""
    queued = [node for _, _, node in cache.core.lru._queue]
    assert len(set(queued)) == len(queued)
    assert all(node.queued for node in queued)
    assert sum(node.parent is None for node in queued) == cache.core.lru._num_gone
    assert all(last_used <= node.last_used for last_used, _, node in cache.core.lru._queue)
    waiting = set()
    for slab, nodes in cache.core.evictor._aside.items():
        waiting |= set(nodes)
        assert slab.awaited == (slab.pins > 0) or slab in cache.core.store._unpinned
    assert leaves <= set(queued) | waiting


def check_pins_and_bytes(cache: RoutingCache, leases: Iterable[RowsLease] | None) -> None:
    pinned: Counter[Slab] = Counter()
    for session in cache.core.open_sessions:
        pinned.update(session._pinned)
        assert {s.slab for s in session._segments} == session._pinned
    for lease in leases or ():
        pinned.update(*lease._held)
    num_bytes = 0
    for slab in cache.core.store._slabs:
        assert slab.pins == pinned[slab] if leases is not None else slab.pins >= pinned[slab]
        assert slab.used <= len(slab.rows)
        num_bytes += 0 if slab.spilled else slab.rows.nbytes
        num_bytes += 0 if slab.digests is None else slab.digests.nbytes
    assert cache.core.store.memory_bytes >= num_bytes
    if leases is not None:
        assert cache.core.store.memory_bytes == num_bytes
        token_bytes = sum(session.token_bytes for session in cache.core.open_sessions)
        assert cache.held_bytes() == num_bytes + token_bytes + cache.core.lru.num_bytes
