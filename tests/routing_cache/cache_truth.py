"""Rows that are a function of version and prefix, and a check of everything a cache holds."""

from __future__ import annotations

import numpy as np

from routing_cache import RoutingCache, RowLayout
from routing_cache.radix_tree import TOKEN_BYTES
from routing_cache.routed_experts import Rows
from routing_cache.segments import Slab

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


def check_integrity(cache: RoutingCache) -> None:
    """Every invariant of trees, segments, byte counts and pins; the rows against the truth."""
    num_nodes = edge_bytes = 0
    leaves = set()
    for version, tree in cache.trees():
        for node in tree.nodes():
            num_nodes += 1
            edge_bytes += len(node.edge)
            if not node.children:
                leaves.add(node)
            assert node.parent is not None
            assert node.edge
            assert node.start == node.parent.end
            assert node.parent.children[node.edge[:TOKEN_BYTES]] is node
            tokens = tuple(np.frombuffer(tree.key(node), np.int32).tolist())
            position = node.start
            for segment in node.payload.segments:
                assert position <= segment.start < segment.stop <= node.end
                position = segment.stop
                assert segment.provenance.weight_version == version
                assert segment.offset + segment.stop - segment.start <= segment.slab.used
                expected = true_rows(version, tokens, segment.start, segment.stop)
                np.testing.assert_array_equal(segment.rows, expected)
            if node.payload.prefix_known:
                for step in tree.path(node):
                    assert step.payload.known_until(step.start) == step.end
    assert cache.lru.num_nodes == num_nodes
    assert cache.lru.edge_bytes == edge_bytes
    assert set(cache.lru.leaves) == leaves
    pinned: dict[Slab, int] = {}
    for session in cache._sessions.values():
        for slab in session._pinned:
            pinned[slab] = pinned.get(slab, 0) + 1
        assert {s.slab for s in session._segments} == session._pinned
    for slab in cache.store._slabs:
        assert slab.pins >= pinned.get(slab, 0)
        assert slab.used <= len(slab.rows)
