"""Several engines as one: sessions that stick and move, engines that die and come back."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from fake_sglang import (
    Answer,
    FakeSGLang,
    too_late,
)
from http_engine_helpers import WEIGHTS, ask, assert_true_rows, connect, ids, run

from agent_rl.engines.balanced import BalancedEngine, BalancedOptions
from agent_rl.errors import (
    EngineError,
    EngineTimeoutError,
)
from agent_rl.types import Completion

BALANCED = BalancedOptions(revive_every_s=0.01, revive_timeout_s=5.0, min_warm_tokens=16)


def test_a_late_answer_is_not_asked_for_again_by_a_fleet_and_keeps_the_engine_in_service() -> None:
    """It would be drawn again until it is short; every time the engine would be taken away."""

    async def scenario() -> None:
        fake = FakeSGLang()
        fleet = BalancedEngine([await connect(fake)], BALANCED)
        fake.faults = [too_late] * 50
        async with asyncio.timeout(10):
            with pytest.raises(EngineTimeoutError, match="ReadTimeout"):
                await fleet.generate(ask(ids(9)))
        assert (fleet.num_in_service, fleet.stats.engines_lost) == (1, 0)
        fake.faults = []
        assert_true_rows(ids(9), await fleet.generate(ask(ids(9))))
        await fleet.aclose()

    run(scenario)


def test_a_server_that_hangs_leaves_service() -> None:
    def hang(answer: Answer) -> Answer:
        fake.up = False
        return too_late(answer)

    fake = FakeSGLang()

    async def scenario() -> None:
        fleet = BalancedEngine([await connect(fake)], BALANCED)
        fake.faults = [hang]
        with pytest.raises(EngineTimeoutError):
            await fleet.generate(ask(ids(9)))
        assert (fleet.num_in_service, fleet.stats.engines_lost) == (0, 1)
        fake.restart()
        assert_true_rows(ids(9), await fleet.generate(ask(ids(9))))
        await fleet.aclose()

    run(scenario)


async def fleet_of(*fakes: FakeSGLang) -> BalancedEngine:
    engines = [await connect(fake, f"e{n}") for n, fake in enumerate(fakes)]
    return BalancedEngine(engines, BALANCED)


def test_a_killed_engine_loses_no_trajectory() -> None:
    async def scenario() -> None:
        fakes = [FakeSGLang(), FakeSGLang()]
        fleet = await fleet_of(*fakes)

        async def trajectory(n: int) -> list[Completion]:
            prompt, have, turns = ids(20, seed=n), 0, []
            for turn in range(6):
                if n == 0 and turn == 2:
                    fakes[0].crash()
                if n == 0 and turn == 4:
                    fakes[0].restart()
                completion = await fleet.generate(ask(prompt, f"t{n}", have))
                assert completion.routed_experts_start in (have, 0)
                assert_true_rows(prompt, completion)
                turns.append(completion)
                whole = np.concatenate([prompt, completion.token_ids])
                have = len(whole) - 1
                prompt = np.concatenate([whole, ids(3, 100 * n + turn)])
            return turns

        done = await asyncio.gather(*(trajectory(n) for n in range(8)))
        assert all(len(turns) == 6 for turns in done)
        assert {c.engine for turns in done for c in turns} == {"e0", "e1"}
        assert fleet.stats.moved_sessions >= 1
        assert fleet.stats.engines_lost >= 1
        await asyncio.sleep(0.1)
        assert fleet.num_in_service == 2
        assert fleet.stats.engines_revived >= 1
        assert fleet.metrics()["engine_bad_replies"] == 0
        await fleet.aclose()

    run(scenario)


def test_an_only_engine_that_restarts_is_waited_for_and_gets_its_weights_back() -> None:
    async def scenario() -> None:
        fake = FakeSGLang()
        fleet = await fleet_of(fake)
        await fleet.load_weights(WEIGHTS, 4)
        fake.crash()
        waiting = asyncio.ensure_future(fleet.generate(ask(ids(9))))
        await asyncio.sleep(0.05)
        fake.restart()
        completion = await waiting
        assert completion.weight_versions == (4,)
        assert_true_rows(ids(9), completion, weights=4)
        await fleet.aclose()

    run(scenario)


def test_an_update_reaches_all_engines_or_they_leave_service() -> None:
    async def scenario() -> None:
        fakes = [FakeSGLang(), FakeSGLang()]
        fleet = await fleet_of(*fakes)
        fakes[1].refuse_updates = True
        await fleet.load_weights(WEIGHTS, 1)
        assert fleet.weight_version == 1
        assert fleet.num_in_service == 1
        for n in range(6):
            completion = await fleet.generate(ask(ids(9, n), f"s{n}"))
            assert completion.weight_versions == (1,)
            assert completion.engine == "e0"
        fakes[1].refuse_updates = False
        await asyncio.sleep(0.1)
        assert fleet.num_in_service == 2
        assert fakes[1].version == "1"
        for fake in fakes:
            fake.refuse_updates = True
        with pytest.raises(EngineError, match="no engine took version 2"):
            await fleet.load_weights(WEIGHTS, 2)
        assert fleet.num_in_service == 0
        await fleet.aclose()

    run(scenario)


def test_no_request_is_answered_while_engines_differ() -> None:
    async def scenario() -> None:
        fakes = [FakeSGLang(latency_s=0.0), FakeSGLang(latency_s=0.0)]
        fleet = await fleet_of(*fakes)
        for fake in fakes:
            fake.latency_s = 0.03
        before = [asyncio.ensure_future(fleet.generate(ask(ids(9, n), f"b{n}"))) for n in range(6)]
        await asyncio.sleep(0.005)
        update = asyncio.ensure_future(fleet.load_weights(WEIGHTS, 1))
        await asyncio.sleep(0.005)
        after = [asyncio.ensure_future(fleet.generate(ask(ids(9, n), f"a{n}"))) for n in range(6)]
        await update
        assert {c.weight_versions for c in await asyncio.gather(*before)} == {(0,)}
        assert {c.weight_versions for c in await asyncio.gather(*after)} == {(1,)}
        await fleet.aclose()

    run(scenario)


def test_sessions_stick_and_new_ones_go_where_their_prefix_is_warm() -> None:
    async def scenario() -> None:
        fleet = await fleet_of(FakeSGLang(), FakeSGLang())
        homes = {}
        for n in range(4):
            homes[n] = (await fleet.generate(ask(ids(40, n), f"s{n}"))).engine
        assert set(homes.values()) == {"e0", "e1"}
        for n in range(4):
            sibling = np.concatenate([ids(40, n), ids(3, 50 + n)])
            assert (await fleet.generate(ask(sibling, f"sibling{n}"))).engine == homes[n]
            assert (await fleet.generate(ask(sibling, f"s{n}"))).engine == homes[n]
        assert fleet.stats.warm_placements == 4
        assert fleet.stats.moved_sessions == 0
        await fleet.end_session("s0")
        await fleet.end_session("never seen")
        await fleet.aclose()

    run(scenario)
