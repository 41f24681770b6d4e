"""Rows over a plain array read like a lease."""

import numpy as np
import pytest
from cache_truth import LAYOUT, TOY, random_rows, true_rows

from routing_cache import (
    ArrayRows,
    DigestMismatchError,
    RoutingCache,
    RowCountError,
    gather_ranges,
    zigzag_ranges,
)

IDS = np.arange(8, dtype=np.int32)


def test_it_reads_like_the_lease_of_the_same_rows() -> None:
    truth = true_rows(3, tuple(range(8)), 0, 7)
    session = RoutingCache(LAYOUT).session(3)
    session.record(IDS, truth, start=0, weight_version=3, num_prefill=5)
    lease, array = session.lease(), ArrayRows(LAYOUT, IDS, truth, weight_version=3)
    for one, two in zip(lease.gather(layers=[1]), array.gather(layers=[1]), strict=True):
        np.testing.assert_array_equal(one, two)
    assert (array.num_tokens, array.weight_versions) == (8, (3,))
    assert array.digest == lease.digest
    array.verify(IDS)
    array.release()
    array.release()
    with pytest.raises(DigestMismatchError):
        array.verify(IDS[::-1].copy())


def test_a_row_for_the_last_token_is_dropped_since_it_was_never_fed() -> None:
    rows = random_rows(np.random.default_rng(0), 8, TOY)
    gathered, present = ArrayRows(TOY, IDS, rows).gather()
    assert not present[7]
    np.testing.assert_array_equal(gathered[:7], rows[:7])


@pytest.mark.parametrize("num_rows", [0, 6, 9])
def test_any_other_number_of_rows_is_an_error(num_rows: int) -> None:
    with pytest.raises(RowCountError, match="do not cover"):
        ArrayRows(TOY, IDS, np.zeros((num_rows, 3, 2), np.uint8))


def test_absent_and_bad_rows_are_missing() -> None:
    rows = random_rows(np.random.default_rng(0), 7, TOY)
    rows[4] = 0
    present = np.array([True, False, True, True, True, True, True])
    array = ArrayRows(TOY, IDS, rows, present)
    assert array.gather()[1].tolist() == [True, False, True, True, False, True, True, False]
    assert array.num_bad == 1
    with pytest.raises(RowCountError):
        ArrayRows(TOY, IDS, rows, present[:3])


def test_a_single_token_has_no_rows() -> None:
    array = ArrayRows(TOY, IDS[:1], np.zeros((0, 3, 2), np.uint8), weight_version=4)
    rows, present = array.gather()
    assert rows.shape == (1, 3, 2)
    assert not present.any()
    assert array.weight_versions == (4,)
    array.verify(IDS[:1])
    with pytest.raises(RowCountError):
        ArrayRows(TOY, IDS[:0], np.zeros((0, 3, 2), np.uint8))


def test_context_parallel_ranks_get_their_zigzag_chunks() -> None:
    assert zigzag_ranges(16, 0, 2) == ((0, 4), (12, 16))
    assert zigzag_ranges(16, 1, 2) == ((4, 8), (8, 12))
    assert zigzag_ranges(15, 0, 1) == ((0, 15),)
    rows = random_rows(np.random.default_rng(0), 12, TOY)
    array = ArrayRows(TOY, np.arange(13, dtype=np.int32), rows)
    padded = np.full((16, 3, 2), TOY.missing, np.uint8)
    padded[:12] = rows
    for rank in range(2):
        ranges = zigzag_ranges(16, rank, 2)
        part, present = gather_ranges(array, ranges, layers=[2, 0])
        index = np.concatenate([np.arange(a, b) for a, b in ranges])
        np.testing.assert_array_equal(part, padded[index][:, [2, 0]])
        assert present.tolist() == (index < 12).tolist()
    assert gather_ranges(array, [(0, 2)])[0].shape == (2, 3, 2)


@pytest.mark.parametrize("arguments", [(15, 0, 2), (16, 2, 2), (16, -1, 2)])
def test_impossible_ranks_and_lengths_are_refused(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(RowCountError):
        zigzag_ranges(*arguments)
