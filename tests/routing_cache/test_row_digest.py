"""Digests: what they bind, and that they can be cut and joined."""

import numpy as np
import pytest
from cache_truth import TOY, random_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from routing_cache import RowLayout
from routing_cache.digest import Digester, join, tail_digest, total

LAYOUTS = [
    TOY,
    RowLayout(3, (0, 1, 2), 128, 8),
    RowLayout(2, (0, 1), 16, 4),
    RowLayout(2, (0, 1), 16, 1),
    RowLayout(2, (0, 1), 300, 3),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_single_change_is_seen(layout: RowLayout) -> None:
    """Each bit of each row, each token, the position and the version."""
    rng = np.random.default_rng(0)
    rows, ids = random_rows(rng, 3, layout), np.array([5, 6, 7], np.int32)
    digester = Digester(layout)
    reference = digester.rows(rows, ids, start=10, weight_version=1)
    raw = rows.reshape(-1).view(np.uint8)
    for byte in range(len(raw)):
        for bit in range(8):
            raw[byte] ^= 1 << bit
            changed = digester.rows(rows, ids, start=10, weight_version=1)
            assert np.count_nonzero(changed != reference) == 1
            raw[byte] ^= 1 << bit
    for position in range(3):
        other = ids.copy()
        other[position] += 1
        changed = digester.rows(rows, other, start=10, weight_version=1)
        assert (changed != reference).tolist() == [p == position for p in range(3)]
    assert (digester.rows(rows, ids, start=11, weight_version=1) != reference).all()
    assert (digester.rows(rows, ids, start=10, weight_version=2) != reference).all()
    other_key = Digester(layout, key=2).rows(rows, ids, start=10, weight_version=1)
    assert (other_key != reference).all()


def test_top_bits_in_two_words_do_not_cancel() -> None:
    """A plain sum of products modulo 2**64 with odd keys misses exactly this pair of flips."""
    layout = RowLayout(4, (0, 1, 2, 3), 255, 8)
    rows = random_rows(np.random.default_rng(0), 2000, layout)
    flipped = rows.copy()
    flipped[:, 0, 7] ^= 0x80
    flipped[:, 2, 7] ^= 0x80
    ids = np.zeros(2000, np.int32)
    digester = Digester(layout)
    one = digester.rows(rows, ids, start=0, weight_version=0)
    two = digester.rows(flipped, ids, start=0, weight_version=0)
    assert (one != two).all()


def test_digests_of_many_similar_rows_all_differ() -> None:
    layout = RowLayout(1, (0,), 128, 8)
    rows = np.tile(np.arange(8, dtype=np.uint8), (128 * 64, 1, 1))
    rows[:, 0, 7] = np.arange(len(rows)) % 128
    rows[:, 0, 6] = np.arange(len(rows)) // 128
    digester = Digester(layout)
    same_place = np.concatenate(
        [
            digester.rows(rows[i : i + 1], np.zeros(1, np.int32), start=0, weight_version=0)
            for i in range(0, len(rows), 7)
        ]
    )
    assert len(np.unique(same_place)) == len(same_place)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 1000))
def test_cut_and_joined_ranges_have_the_digest_of_the_whole(parts: list[int], start: int) -> None:
    """Any cut of the rows, and any size of the chunks in which they are hashed."""
    rng = np.random.default_rng(start)
    rows = random_rows(rng, sum(parts), TOY)
    ids = rng.integers(0, 1000, len(rows)).astype(np.int32)
    digester = Digester(TOY)
    whole = digester.rows(rows, ids, start=start, weight_version=3)
    digests = []
    at = 0
    for part in parts:
        piece = slice(at, at + part)
        digests.append(
            total(digester.rows(rows[piece], ids[piece], start=start + at, weight_version=3))
        )
        at += part
    assert join(*digests) == total(whole)


def test_large_blocks_are_hashed_in_chunks_with_the_same_result() -> None:
    layout = RowLayout(48, tuple(range(48)), 128, 8)
    rows = np.tile(np.arange(8, dtype=np.uint8), (3000, 48, 1))
    ids = np.arange(3000, dtype=np.int32)
    digester = Digester(layout)
    whole = digester.rows(rows, ids, start=0, weight_version=1)
    one = digester.rows(rows[2999:], ids[2999:], start=2999, weight_version=1)
    assert whole[2999] == one[0]
    assert len(digester.rows(rows[:0], ids[:0], start=0, weight_version=1)) == 0


def test_a_run_of_layers_can_be_hashed_alone() -> None:
    rows = random_rows(np.random.default_rng(0), 4, TOY)
    ids = np.arange(4, dtype=np.int32)
    digester = Digester(TOY)
    part = np.ascontiguousarray(rows[:, 1:])
    own = digester.rows(part, ids, start=0, weight_version=1, first_layer=1)
    moved = digester.rows(part, ids, start=0, weight_version=1, first_layer=0)
    assert (own != moved).all()


def test_tokens_without_rows_count() -> None:
    one = tail_digest(np.array([7], np.int32).tobytes(), 3, key=1)
    assert one != tail_digest(np.array([8], np.int32).tobytes(), 3, key=1)
    assert one != tail_digest(np.array([7], np.int32).tobytes(), 4, key=1)
    assert tail_digest(b"", 3, key=1) == 0
