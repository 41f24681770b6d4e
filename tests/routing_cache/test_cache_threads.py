"""One owner changes the cache while others read: threads on snapshots, asyncio with an executor."""

import asyncio
import queue
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from cache_truth import LAYOUT, check_integrity, true_rows

from routing_cache import ConcurrencyError, RoutingCache, RowsLease


def take_turn(cache: RoutingCache, tokens: tuple[int, ...], new: tuple[int, ...]) -> RowsLease:
    with cache.session(1) as session:
        session.adopt(np.array(tokens, np.int32))
        start, both = session.num_rows, tokens + new
        session.record(
            np.array(new, np.int32),
            true_rows(1, both, start, len(both) - 1),
            start=start,
            weight_version=1,
            num_prefill=len(tokens) - start,
        )
        return session.lease()


def check(lease: RowsLease, tokens: tuple[int, ...], rng: random.Random) -> None:
    start = rng.randrange(len(tokens))
    stop = rng.randrange(start, len(tokens)) + 1
    rows, present = lease.gather(start=start, stop=stop)
    known = min(stop, len(tokens) - 1)
    assert present[: known - start].all()
    np.testing.assert_array_equal(rows[: known - start], true_rows(1, tokens, start, known))
    lease.verify(np.array(tokens, np.int32))


def test_threads_read_snapshots_while_the_owner_appends_evicts_and_spills(tmp_path: Path) -> None:
    cache = RoutingCache(LAYOUT, budget_bytes=150_000, spill_dir=tmp_path)
    handed: queue.Queue[tuple[RowsLease, tuple[int, ...]] | None] = queue.Queue(maxsize=10)
    faults: list[BaseException] = []

    def read(seed: int) -> None:
        rng = random.Random(seed)
        while (item := handed.get()) is not None:
            try:
                check(*item, rng)
                item[0].release()
            except BaseException as fault:
                faults.append(fault)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    rng = random.Random(99)
    histories: list[tuple[int, ...]] = [tuple(range(30))]
    for turn in range(300):
        history = rng.choice(histories)
        new = tuple(rng.randrange(5) for _ in range(rng.randrange(1, 6)))
        handed.put((take_turn(cache, history, new), history + new))
        histories = [*histories[-20:], history + new]
        if turn % 7 == 0:
            cache.evict(500)
        if turn % 11 == 0:
            cache.spill(500)
    for _ in threads:
        handed.put(None)
    for thread in threads:
        thread.join(30)
    assert not faults, faults[0]
    assert cache.stats().num_leases == 0
    check_integrity(cache)
    cache.evict(1 << 30)
    assert cache.held_bytes() == 0


def test_an_event_loop_owns_the_cache_and_gathers_in_an_executor() -> None:
    cache = RoutingCache(LAYOUT)

    async def agent(number: int, pool: ThreadPoolExecutor) -> None:
        loop = asyncio.get_running_loop()
        rng = random.Random(number)
        tokens = (*range(20), number)
        for _ in range(5):
            new = (rng.randrange(50), rng.randrange(50))
            lease = take_turn(cache, tokens, new)
            tokens += new
            await asyncio.sleep(0)
            await loop.run_in_executor(pool, check, lease, tokens, rng)
            lease.release()

    async def main() -> None:
        with ThreadPoolExecutor(3) as pool:
            await asyncio.gather(*(agent(number, pool) for number in range(16)))

    asyncio.run(main())
    assert cache.stats().num_leases == 0
    check_integrity(cache)


def test_a_second_owner_is_refused() -> None:
    cache = RoutingCache(LAYOUT)
    session = cache.session(1)
    with cache.core.guard:
        for action in (
            lambda: session.adopt(np.array([1], np.int32)),
            lambda: cache.match(np.array([1], np.int32), {1}),
            lambda: cache.retire(before=2),
            lambda: cache.evict(1),
            lambda: cache.lease(np.array([1], np.int32), {1}),
        ):
            with pytest.raises(ConcurrencyError, match="one owner"):
                action()
    session.adopt(np.array([1], np.int32))


def test_a_lease_released_during_a_gather_never_reads_as_missing() -> None:
    """A reader gets the rows or an error, not an array of missing marks."""
    cache = RoutingCache(LAYOUT)
    lease = take_turn(cache, tuple(range(30)), (1, 2))
    runs = lease._runs

    def release_in_between(start: int, stop: int) -> object:
        found = runs(start, stop)
        lease.release()
        return found

    lease._runs = release_in_between  # type: ignore[method-assign, assignment]
    with pytest.raises(Exception, match="released"):
        lease.gather()


def test_a_lease_released_by_many_threads_at_once_is_given_back_once() -> None:
    cache = RoutingCache(LAYOUT)
    for _ in range(50):
        lease = take_turn(cache, tuple(range(30)), (1, 2))
        slabs = {segment.slab for segment in lease.segments}
        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(lease.release) for _ in range(8)]:
                done.result()
        assert cache.stats().num_leases == 0
        assert [slab.pins for slab in slabs] == [0] * len(slabs)
