"""Budget, eviction, spilling, retiring and the byte accounts."""

import gc
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from cache_truth import LAYOUT, check_integrity, true_rows

from routing_cache import BudgetError, RoutingCache, RowLayout, RowsLease, Session
from routing_cache.bench_workload import make_rows

ROW_BYTES = LAYOUT.row_bytes + 8  # with its digest


def fill(cache: RoutingCache, first: int, length: int = 400, version: int = 1) -> Session:
    """A session of ``length`` tokens that shares nothing with another ``first``."""
    tokens = (first, *range(1, length))
    session = cache.session(version)
    session.record(
        np.array(tokens, np.int32),
        true_rows(version, tokens, 0, length - 1),
        start=0,
        weight_version=version,
        num_prefill=5,
    )
    return session


def rows_of(cache: RoutingCache, first: int, length: int = 400, version: int = 1) -> int:
    return cache.match(np.array((first, *range(1, length)), np.int32), {version}).num_rows


def assert_intact(lease: RowsLease, first: int, length: int = 400) -> None:
    tokens = (first, *range(1, length))
    rows, present = lease.gather(stop=length - 1)
    assert present.all()
    np.testing.assert_array_equal(rows, true_rows(1, tokens, 0, length - 1))
    lease.verify(np.array(tokens, np.int32))


def test_the_least_recently_used_entry_goes_first_and_the_budget_holds() -> None:
    budget = 40_000
    cache = RoutingCache(LAYOUT, budget_bytes=budget)
    for first in range(100, 110):
        fill(cache, first).close()
        assert rows_of(cache, 100) == 399  # keeps the first one in use
        assert cache.stats().held_bytes <= budget
        check_integrity(cache)
    assert rows_of(cache, 109) == 399
    assert rows_of(cache, 101) == 0
    assert cache.stats().rows_evicted > 0


def test_a_parent_without_children_left_becomes_evictable() -> None:
    cache = RoutingCache(LAYOUT)
    session = fill(cache, 100)
    branch = session.branch(200)
    branch.record(
        np.array([7, 8], np.int32),
        true_rows(1, (*(100, *range(1, 200)), 7, 8), 200, 201),
        start=200,
        weight_version=1,
        num_prefill=0,
    )
    session.close()
    branch.close()
    assert cache.evict(1 << 30) > 0
    stats = cache.stats()
    assert (stats.held_bytes, stats.num_nodes) == (0, 0)
    check_integrity(cache)


def test_leased_rows_are_spilled_instead_of_lost(tmp_path: Path) -> None:
    cache = RoutingCache(LAYOUT, budget_bytes=50_000, spill_dir=tmp_path / "spill")
    leases = []
    for first in range(100, 108):
        with fill(cache, first) as session:
            leases.append(session.lease())
        assert cache.stats().held_bytes <= 50_000
    assert cache.stats().spilled_bytes > 0
    assert cache.stats().spills > 0
    for first, lease in zip(range(100, 108), leases, strict=True):
        assert_intact(lease, first)
    check_integrity(cache)
    assert list((tmp_path / "spill").iterdir()) == []  # nameless files leave nothing behind
    for lease in leases:
        lease.release()
    cache.evict(1 << 30)
    assert cache.stats().spilled_bytes == 0


def test_rows_read_before_a_spill_stay_valid(tmp_path: Path) -> None:
    cache = RoutingCache(LAYOUT, spill_dir=tmp_path)
    with fill(cache, 100) as session:
        lease = session.lease()
    view = lease.segments[0].rows
    before = view.copy()
    assert cache.spill(1) == 0  # the view still holds the memory
    np.testing.assert_array_equal(view, before)
    held = cache.stats().row_bytes
    del view
    assert cache.stats().row_bytes == held - 399 * LAYOUT.row_bytes
    assert_intact(lease, 100)


def test_without_a_place_to_spill_the_cache_refuses_and_changes_nothing() -> None:
    cache = RoutingCache(LAYOUT, budget_bytes=20_000)
    leases = [fill(cache, first).lease() for first in (100, 101)]
    before = cache.stats()
    with pytest.raises(BudgetError, match="set spill_dir") as caught:
        fill(cache, 102)
    assert "budget_bytes=20000" in str(caught.value)
    after = cache.stats()
    assert (after.row_bytes, after.num_nodes) == (before.row_bytes, before.num_nodes)
    for first, lease in zip((100, 101), leases, strict=True):
        assert_intact(lease, first)
    check_integrity(cache)


def test_a_session_that_was_refused_goes_on_once_there_is_room() -> None:
    cache = RoutingCache(LAYOUT, budget_bytes=20_000)
    others = [fill(cache, first) for first in (100, 101)]
    session = cache.session(1)
    tokens = (102, *range(1, 400))
    block = true_rows(1, tokens, 0, 399)
    with pytest.raises(BudgetError):
        session.record(np.array(tokens, np.int32), block, start=0, weight_version=1, num_prefill=5)
    assert session.num_tokens == 0
    others[0].close()
    session.record(np.array(tokens, np.int32), block, start=0, weight_version=1, num_prefill=5)
    assert_intact(session.lease(), 102)
    assert rows_of(cache, 100) == 0


def test_retire_drops_old_versions_and_names_the_held_ones() -> None:
    cache = RoutingCache(LAYOUT)
    fill(cache, 100, version=1).close()
    fill(cache, 101, version=2).close()
    with fill(cache, 102, version=2) as session:
        lease = session.lease()
    fill(cache, 103, version=3).close()
    before = cache.held_bytes()
    report = cache.retire(before=3)
    assert report.retired_versions == (1,)
    assert report.held_versions == (2,)
    assert report.rows_dropped == 2 * 399
    assert report.bytes_freed == before - cache.held_bytes() > 2 * 399 * ROW_BYTES
    assert [rows_of(cache, f, version=v) for f, v in ((100, 1), (101, 2), (103, 3))] == [0, 0, 399]
    assert rows_of(cache, 102, version=2) == 399
    lease.verify(np.array((102, *range(1, 400)), np.int32))
    lease.release()
    assert cache.retire(before=3).retired_versions == (2,)
    assert cache.stats().weight_versions == (3,)
    check_integrity(cache)


def test_the_accounts_agree_with_what_python_allocated() -> None:
    layout = RowLayout(48, tuple(range(48)), 128, 8)
    rng = np.random.default_rng(0)
    blocks = [make_rows(rng, 500) for _ in range(6)]
    warm_up = RoutingCache(layout).session(1)  # allocates the work buffers of this thread
    warm_up.record(
        np.arange(501, dtype=np.int32), blocks[0], start=0, weight_version=1, num_prefill=1
    )
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    cache = RoutingCache(layout)
    for number in range(6):
        session = cache.session(1)
        for turn in range(4):
            start = session.num_rows
            count = 500 - (turn == 0)
            session.record(
                rng.integers(0, 1000, 500).astype(np.int32),
                blocks[(number + turn) % 6][:count],
                start=start,
                weight_version=1,
                num_prefill=100,
            )
        session.close()
    gc.collect()
    traced = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    stats = cache.stats()
    assert stats.row_bytes == 6 * 1999 * (layout.row_bytes + 8)
    assert 0.97 < stats.held_bytes / traced < 1.03


def test_a_completed_slab_gives_back_what_it_never_used() -> None:
    layout = RowLayout(48, tuple(range(48)), 128, 8)
    cache = RoutingCache(layout)
    session = cache.session(1)
    rng = np.random.default_rng(0)
    block = make_rows(rng, 2999)
    tokens = np.arange(3000, dtype=np.int32)
    session.record(tokens, block, start=0, weight_version=1, num_prefill=9)
    more = make_rows(rng, 100)
    session.record(tokens[:100], more, start=2999, weight_version=1, num_prefill=9)
    lease = session.lease()
    assert cache.stats().row_bytes > 4 << 20
    session.close()
    assert cache.stats().row_bytes == 3099 * (layout.row_bytes + 8)
    np.testing.assert_array_equal(lease.gather(stop=3099)[0], np.concatenate([block, more]))
    lease.verify(np.concatenate([tokens, tokens[:100]]))


def test_one_session_never_holds_more_than_one_unfinished_slab() -> None:
    """Small sessions stay small: a slab at most doubles what its session holds."""
    cache = RoutingCache(LAYOUT)
    session = cache.session(1)
    tokens: tuple[int, ...] = ()
    for _ in range(60):
        start = session.num_rows
        new = (1, 2, 3)
        tokens += new
        session.record(
            np.array(new, np.int32),
            true_rows(1, tokens, start, len(tokens) - 1),
            start=start,
            weight_version=1,
            num_prefill=0,
        )
    assert cache.stats().row_bytes <= 2.1 * session.num_rows * ROW_BYTES
    session.close()
    assert cache.stats().row_bytes <= 1.05 * 179 * ROW_BYTES


def test_an_entry_that_grows_again_after_an_eviction_does_not_claim_new_rows() -> None:
    """A stem whose branches were evicted is a leaf again and grows in place."""
    cache = RoutingCache(LAYOUT)
    for tokens in ((2, 0), (2, 1)):
        session = cache.session(1)
        session.record(
            np.array(tokens, np.int32),
            true_rows(1, tokens, 0, 1),
            start=0,
            weight_version=1,
            num_prefill=1,
        )
        session.close()
    assert cache.match([2], {1}) == (1, 1, (1,))
    stem = cache.core.tree(1).root.children[np.int32(2).tobytes()]
    for leaf in list(stem.children.values()):
        cache.core.lru.remove(leaf)
    fill(cache, 2, 5).close()
    assert cache.match([2, 1, 2, 3, 4], {1}) == (5, 4, (1,))
    check_integrity(cache)


def test_pinned_leaves_are_passed_once_and_come_back_when_their_pins_go() -> None:
    """Else every eviction at a full budget would walk over all of them."""
    cache = RoutingCache(LAYOUT, budget_bytes=200_000)
    leases = []
    for first in range(100, 140):
        with fill(cache, first, 50) as session:
            leases.append(session.lease())
    for first in range(1000, 1200):
        fill(cache, first, 50).close()
    assert cache.stats().rows_evicted > 0
    in_order = {node for _, _, node in cache.core.lru._queue}
    assert not any(node.payload.pinned_slab() for node in in_order)
    check_integrity(cache, leases)
    rows_of(cache, 110, 50)  # used last: goes after the others
    for lease in leases:
        lease.release()
    check_integrity(cache, ())
    for first in range(2000, 2160):
        fill(cache, first, 50).close()
    assert [rows_of(cache, first, 50) for first in (100, 139, 1199)] == [0, 0, 0]
    cache.evict(1 << 30)
    assert cache.held_bytes() == 0


def test_a_leaf_that_lost_its_pinned_rows_to_a_split_can_be_evicted() -> None:
    """It was set aside for a lease on rows that its upper half holds now."""
    cache = RoutingCache(LAYOUT)
    with fill(cache, 100, 50) as session:
        prefix = session.branch(20)
        lease = prefix.lease()
        prefix.close()
        more = (100, *range(1, 50), 7, 8)
        session.record(
            np.array([7, 8], np.int32),
            true_rows(1, more, 49, 51),
            start=49,
            weight_version=1,
            num_prefill=0,
        )
    assert cache.evict(1) == 0
    with cache.session(1) as other:
        tokens = (100, *range(1, 49), 3, 4)
        other.record(
            np.array(tokens, np.int32),
            true_rows(1, tokens, 0, 50),
            start=0,
            weight_version=1,
            num_prefill=49,
        )
    check_integrity(cache, [lease])
    assert cache.evict(1 << 30) > 0
    check_integrity(cache, [lease])
    assert rows_of(cache, 100, 50) <= 49
