"""The token tree alone, against a dictionary of prefixes."""

import random

import numpy as np
import pytest
from cache_truth import key_of

from routing_cache.radix_tree import (
    TOKEN_BYTES,
    NodeLru,
    Position,
    RadixTree,
    common_prefix_bytes,
)
from routing_cache.row_index import RowIndex


def key(*tokens: int) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def new_tree() -> RadixTree[RowIndex]:
    return RadixTree(RowIndex, NodeLru())


def insert(tree: RadixTree[RowIndex], tokens: bytes) -> Position[RowIndex]:
    return tree.insert(tokens, Position(tree.root, 0))


def test_lookups_walk_past_full_nodes_and_into_edges() -> None:
    """Prompt 1..5 and generated 6, 7, 8 stored; asked for 1..10: eight tokens match."""
    tree = new_tree()
    insert(tree, key(1, 2, 3, 4, 5))
    insert(tree, key(1, 2, 3, 4, 5, 6, 7, 8))
    assert tree.walk(key(*range(1, 11))).num_tokens == 8
    insert(tree, key(1, 2, 5))
    for tokens, matched in [
        ((1, 2, 3), 3),
        ((1, 2), 2),
        ((1,), 1),
        ((), 0),
        ((7,), 0),
        ((1, 2, 5, 9), 3),
        ((1, 2, 9), 2),
    ]:
        assert tree.walk(key(*tokens)).num_tokens == matched


def test_the_same_key_again_changes_nothing() -> None:
    lru: NodeLru[RowIndex] = NodeLru()
    tree = RadixTree(RowIndex, lru)
    insert(tree, key(1, 2, 3, 4))
    insert(tree, key(1, 2, 5))
    before = [(n.start, n.edge) for n in tree.nodes()], lru.num_bytes
    for tokens in ((1, 2, 3, 4), (1, 2, 5), (1, 2), (1, 2, 3)):
        insert(tree, key(*tokens))
    assert before == ([(n.start, n.edge) for n in tree.nodes()], lru.num_bytes)


def test_ten_thousand_random_sequences_against_a_dictionary() -> None:
    rng = random.Random(0)
    tree = new_tree()
    prefixes: set[tuple[int, ...]] = set()
    for number in range(10_000):
        tokens = tuple(rng.randrange(3) for _ in range(rng.randrange(1, 12)))
        wanted = max(n for n in range(len(tokens) + 1) if n == 0 or tokens[:n] in prefixes)
        assert tree.walk(key(*tokens)).num_tokens == wanted
        if number % 3 == 0:
            end = insert(tree, key(*tokens))
            assert end.num_tokens == len(tokens)
            prefixes.update(tokens[: n + 1] for n in range(len(tokens)))


def test_positions_survive_splits_and_say_when_they_were_evicted() -> None:
    lru: NodeLru[RowIndex] = NodeLru()
    tree = RadixTree(RowIndex, lru)
    middle = tree.walk(key(1, 2, 3), insert(tree, b""))
    end = insert(tree, key(1, 2, 3, 4, 5))
    middle = tree.walk(key(1, 2, 3))
    insert(tree, key(1, 2, 3, 4, 9))
    settled = tree.settle(middle)
    assert settled is not None
    assert settled.node.start < 3 <= settled.node.end
    assert tree.insert(key(8), settled).num_tokens == 4
    assert tree.walk(key(1, 2, 3, 8)).num_tokens == 4
    leaf = tree.walk(key(1, 2, 3, 4, 5)).node
    assert end.node is leaf
    lru.remove(leaf)
    assert tree.settle(end) is None
    assert tree.walk(key(1, 2, 3, 4, 5)).num_tokens == 4


def test_long_tails_grow_in_place_only_up_to_a_size() -> None:
    tree = new_tree()
    at = Position(tree.root, 0)
    for turn in range(40):
        at = tree.insert(np.full(800, turn, np.int32).tobytes(), at)
    assert at.num_tokens == 32_000
    assert 4 <= len(tree.path(at.node)) <= 10
    assert len(key_of(at.node)) == 32_000 * TOKEN_BYTES


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 100, 5000])
def test_the_common_prefix_is_whole_tokens(length: int) -> None:
    rng = np.random.default_rng(length)
    ids = rng.integers(0, 1 << 30, 6000, dtype=np.int32)
    other = ids.copy()
    other[length] ^= 1 << 24  # differs in the last byte of a token only
    assert common_prefix_bytes(ids.tobytes(), 0, other.tobytes()) == length * TOKEN_BYTES
    short = ids[:length].tobytes()
    assert common_prefix_bytes(ids.tobytes(), 0, short) == length * TOKEN_BYTES
    assert common_prefix_bytes(short, 0, ids.tobytes()) == length * TOKEN_BYTES


def test_the_least_recently_used_leaf_comes_first() -> None:
    lru: NodeLru[RowIndex] = NodeLru()
    tree = RadixTree(RowIndex, lru)
    stem = insert(tree, key(1, 2)).node
    a = insert(tree, key(1, 2, 3)).node
    b = insert(tree, key(1, 2, 4)).node
    assert a is not b
    lru.touch(tree.walk(key(1, 2, 3)).node)
    oldest = lru.oldest()
    assert oldest is not None
    assert oldest is tree.walk(key(1, 2, 4)).node
    lru.remove(oldest)
    remaining = lru.oldest()
    assert remaining is not None
    assert remaining is tree.walk(key(1, 2, 3)).node
    lru.remove(remaining)
    parent = lru.oldest()
    assert parent is not None
    assert parent.start == 0
    assert stem is parent or stem is a
