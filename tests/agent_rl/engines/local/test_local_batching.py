"""Batches, slots and sessions: results must not depend on who shares the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from local_helpers import ask, play, prompt, with_engine

from agent_rl.engines.local import LocalEngine
from agent_rl.engines.local.runner import prefill_batches
from agent_rl.engines.local.slots import SlotTable
from agent_rl.types import Completion


def _equal(a: Completion, b: Completion) -> bool:
    assert a.routed_experts is not None
    assert b.routed_experts is not None
    return (
        np.array_equal(a.token_ids, b.token_ids)
        and np.array_equal(a.logprobs, b.logprobs)
        and np.array_equal(a.routed_experts, b.routed_experts)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_dialogue_is_bit_equal_alone_and_in_company(folder: Path, dtype: str) -> None:
    async def work(engine: LocalEngine) -> None:
        together = await asyncio.gather(
            *[play(engine, f"s{i}", seed=i, num_turns=3) for i in range(13)]
        )
        for i in (0, 4, 12):
            _, alone = await play(engine, f"alone{i}", seed=i, num_turns=3)
            assert all(_equal(a, b) for a, b in zip(alone, together[i][1], strict=True))

    with_engine(folder, work, dtype=dtype, max_sessions=32)


def test_arrival_order_and_gaps_do_not_matter(folder: Path) -> None:
    async def late(engine: LocalEngine, delay: int, i: int) -> list[Completion]:
        for _ in range(delay):
            await asyncio.sleep(0.001)
        return (await play(engine, f"s{i}", seed=i, num_turns=3))[1]

    def run(delays: Sequence[int]) -> list[list[Completion]]:
        async def work(engine: LocalEngine) -> list[list[Completion]]:
            return await asyncio.gather(*[late(engine, d, i) for i, d in enumerate(delays)])

        return with_engine(folder, work)

    first, second = run([0] * 6), run([11, 0, 7, 3, 0, 5])
    for a, b in zip(first, second, strict=True):
        assert all(_equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_group_of_eight_computes_its_prompt_once(folder: Path) -> None:
    async def work(engine: LocalEngine) -> list[Completion]:
        calls = [engine.generate(ask(f"s{i}", prompt(5, 20), seed=i)) for i in range(8)]
        return await asyncio.gather(*calls)

    replies = with_engine(folder, work)
    assert sorted(r.cached_tokens for r in replies) == [0] + [20] * 7
    assert len({tuple(r.token_ids) for r in replies}) > 4  # other seeds, other samples
    for reply in replies[1:]:
        assert reply.routed_experts is not None
        assert replies[0].routed_experts is not None
        np.testing.assert_array_equal(reply.routed_experts[:20], replies[0].routed_experts[:20])

    async def alone(engine: LocalEngine) -> Completion:
        return await engine.generate(ask("x", prompt(5, 20), seed=6))

    assert _equal(with_engine(folder, alone), replies[6])


def test_a_prompt_that_leaves_the_history_truncates_the_slot(folder: Path) -> None:
    async def work(engine: LocalEngine) -> None:
        first = await engine.generate(ask("s", prompt(1, 20)))
        changed = np.concatenate([prompt(1, 20)[:9], prompt(2, 6)])
        second = await engine.generate(ask("s", changed))
        assert second.cached_tokens == 9
        fresh = await engine.generate(ask("t", changed))
        assert fresh.cached_tokens == 0
        assert np.array_equal(second.token_ids, fresh.token_ids)
        assert np.allclose(second.logprobs, fresh.logprobs, atol=1e-5)
        assert np.array_equal(second.routed_experts, fresh.routed_experts)
        again = await engine.generate(ask("s", changed))  # the whole prompt is held
        assert again.cached_tokens == len(changed) - 1
        assert np.array_equal(again.token_ids, second.token_ids)
        assert len(first.token_ids) > 0

    with_engine(folder, work)


def test_rows_of_cached_tokens_come_back_when_asked_for(folder: Path) -> None:
    async def work(engine: LocalEngine) -> None:
        first = await engine.generate(ask("s", prompt(1)))
        longer = np.concatenate([prompt(1), first.token_ids, prompt(2, 5)])
        second = await engine.generate(ask("s", longer, start=0))
        assert second.cached_tokens == len(prompt(1)) + len(first.token_ids) - 1
        assert second.routed_experts is not None
        assert first.routed_experts is not None
        assert len(second.routed_experts) == len(longer) + len(second.token_ids) - 1
        np.testing.assert_array_equal(
            second.routed_experts[: len(first.routed_experts)], first.routed_experts
        )

    with_engine(folder, work)


@pytest.mark.parametrize(
    ("max_new_tokens", "start", "num_rows"), [(1, 0, 12), (1, 12, 0), (3, 12, 2), (3, 5, 9)]
)
def test_row_counts_follow_the_start(
    folder: Path, max_new_tokens: int, start: int, num_rows: int
) -> None:
    async def work(engine: LocalEngine) -> Completion:
        request = ask("s", prompt(1), start=start, max_new_tokens=max_new_tokens, stop=())
        return await engine.generate(request)

    reply = with_engine(folder, work)
    assert reply.routed_experts is not None
    assert len(reply.routed_experts) == num_rows
    assert reply.routed_experts_start == start
    assert reply.finish_reason == "length"


def test_the_stop_token_ends_a_completion_and_is_part_of_it(folder: Path) -> None:
    async def work(engine: LocalEngine) -> None:
        free = await engine.generate(ask("a", prompt(1), stop=(), max_new_tokens=12))
        stop = int(free.token_ids[6])
        length = free.token_ids.tolist().index(stop) + 1
        reply = await engine.generate(ask("b", prompt(1), stop=(stop, 63), max_new_tokens=12))
        assert reply.finish_reason == "stop"
        assert reply.token_ids.tolist() == free.token_ids[:length].tolist()

    with_engine(folder, work)


def test_idle_sessions_lose_their_slot_least_recently_used_first(folder: Path) -> None:
    async def work(engine: LocalEngine) -> None:
        for name in ("a", "b"):
            await engine.generate(ask(name, prompt(1)))
        await engine.generate(ask("a", prompt(1)))
        await engine.generate(ask("c", prompt(2)))
        assert engine.num_sessions == 2
        kept = await engine.generate(ask("a", prompt(1)))
        lost = await engine.generate(ask("b", prompt(1)))
        assert kept.cached_tokens == len(prompt(1)) - 1
        assert lost.cached_tokens == 0
        assert np.array_equal(kept.token_ids, lost.token_ids)

    with_engine(folder, work, max_sessions=2)


def test_more_requests_than_slots_take_turns(folder: Path) -> None:
    async def work(engine: LocalEngine) -> list[list[Completion]]:
        plays = [play(engine, f"s{i}", seed=i, num_turns=3) for i in range(7)]
        return [replies for _, replies in await asyncio.gather(*plays)]

    few, many = with_engine(folder, work, max_sessions=2), with_engine(folder, work)
    for a, b in zip(few, many, strict=True):
        for x, y in zip(a, b, strict=True):
            assert np.array_equal(x.token_ids, y.token_ids)
            np.testing.assert_allclose(x.logprobs, y.logprobs, atol=1e-5)


def test_seeds_decide_the_sample_and_no_seed_means_another_each_time(folder: Path) -> None:
    async def work(engine: LocalEngine) -> list[tuple[int, ...]]:
        seeds = (1, 1, 2, None, None)
        calls = [
            engine.generate(ask(f"s{i}", prompt(1), seed=seed, max_new_tokens=20, stop=()))
            for i, seed in enumerate(seeds)
        ]
        return [tuple(r.token_ids.tolist()) for r in await asyncio.gather(*calls)]

    samples = with_engine(folder, work)
    assert samples[0] == samples[1]
    assert len(set(samples)) == 4


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=60))
def test_prefill_batches_cover_every_lane_once_with_little_padding(lengths: list[int]) -> None:
    batches = prefill_batches(lengths)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        members = [lengths[i] for i in batch]
        assert max(members) <= 2 * min(members)
        assert (1 in members) == (max(members) == 1)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("arf"), st.integers(0, 5)), max_size=40))
def test_slots_are_never_shared_and_busy_ones_never_taken(steps: list[tuple[str, int]]) -> None:
    table = SlotTable(3, max_tokens=4, row_shape=(1, 1), row_dtype=np.dtype(np.uint8))
    busy: dict[str, int] = {}
    for action, number in steps:
        name = f"s{number}"
        if action == "a" and name not in busy:
            slot = table.acquire(name)
            assert (slot is None) == (len(busy) == 3 and name not in table)
            if slot is not None:
                assert slot.index not in busy.values()
                busy[name] = slot.index
        elif action == "r" and name in busy:
            table.release(name)
            del busy[name]
        elif action == "f":
            table.forget(name)
            busy.pop(name, None)
        assert len(table) <= 3
        assert set(busy) <= {n for n in (f"s{i}" for i in range(6)) if n in table}
