"""Weight updates of a server: awaited, proven, undone, or the engine takes no requests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from fake_sglang import (
    FakeSGLang,
)
from http_engine_helpers import WEIGHTS, ask, assert_true_rows, connect, ids, run

from agent_rl.errors import (
    EngineAbortedError,
    EngineError,
    EngineReplyError,
    EngineUnavailableError,
)


def test_the_folder_of_an_update_that_failed_is_removed_and_the_one_before_stays(
    tmp_path: Path,
) -> None:
    weights = tmp_path / "weights"

    async def scenario() -> None:
        fake = FakeSGLang()
        engine = await connect(fake, work_dir=tmp_path, weight_transfer="disk")
        await engine.load_weights(WEIGHTS, 1)
        assert [path.name for path in weights.iterdir()] == ["e-v1"]
        fake.loads_folders = False
        with pytest.raises(EngineError, match="weight version"):
            await engine.load_weights(WEIGHTS, 2)
        assert [path.name for path in weights.iterdir()] == ["e-v1"]
        fake.loads_folders = True
        await engine.load_weights(WEIGHTS, 3)
        assert [path.name for path in weights.iterdir()] == ["e-v3"]
        await engine.aclose()
        assert list(weights.iterdir()) == []

    run(scenario)


def test_a_server_that_restarted_behind_our_back_is_found_by_its_version() -> None:
    async def scenario() -> None:
        fake = FakeSGLang()
        engine = await connect(fake)
        await engine.load_weights(WEIGHTS, 3)
        fake.restart()
        with pytest.raises(EngineReplyError, match="other weights"):
            await engine.generate(ask(ids(9)))
        with pytest.raises(EngineUnavailableError, match="takes no requests"):
            await engine.generate(ask(ids(9)))
        await engine.recover()
        completion = await engine.generate(ask(ids(9)))
        assert completion.weight_versions == (3,)
        assert_true_rows(ids(9), completion, weights=3)

    run(scenario)


def test_an_update_waits_for_running_requests_then_aborts_them() -> None:
    async def scenario() -> None:
        fake = FakeSGLang()
        engine = await connect(fake)
        fake.latency_s = 0.1
        quick = asyncio.ensure_future(engine.generate(ask(ids(9), "quick")))
        await asyncio.sleep(0.02)
        await engine.load_weights(WEIGHTS, 1)
        assert (await quick).weight_versions == (0,)
        fake.latency_s = 60.0
        slow = asyncio.ensure_future(engine.generate(ask(ids(9), "slow")))
        await asyncio.sleep(0.02)
        fake.latency_s = 0.0
        update = asyncio.ensure_future(engine.load_weights(WEIGHTS, 2))
        await asyncio.sleep(0.05)
        newcomer = asyncio.ensure_future(engine.generate(ask(ids(9), "newcomer")))
        await update
        with pytest.raises(EngineAbortedError):
            await slow
        assert (await newcomer).weight_versions == (2,)

    run(scenario)


def test_a_server_that_does_not_go_on_after_a_pause_leaves_nobody_waiting() -> None:
    async def scenario() -> None:
        fake = FakeSGLang()
        engine = await connect(fake)
        fake.refuse_resume = True
        async with asyncio.timeout(10):
            with pytest.raises(EngineError, match="scheduler is stuck"):
                await engine.load_weights(WEIGHTS, 1)
            with pytest.raises(EngineUnavailableError, match="scheduler is stuck"):
                await engine.generate(ask(ids(9)))
            fake.refuse_resume = False
            await engine.load_weights(WEIGHTS, 2)
            assert_true_rows(ids(9), await engine.generate(ask(ids(9))), weights=2)

    run(scenario)


def test_requests_that_a_pause_does_not_end_are_an_error_of_the_engine() -> None:
    async def scenario() -> None:
        fake = FakeSGLang()
        engine = await connect(fake)
        fake.ignore_pause, fake.latency_s = True, 30.0
        running = asyncio.create_task(engine.generate(ask(ids(9))))
        await asyncio.sleep(0.05)
        with pytest.raises(EngineUnavailableError, match="got 1 requests still running"):
            await engine.load_weights(WEIGHTS, 1)
        running.cancel()
        await asyncio.wait({running})

    run(scenario)


def test_an_update_that_fails_or_does_not_flush_closes_the_engine() -> None:
    async def scenario() -> None:
        fake = FakeSGLang()
        engine = await connect(fake)
        fake.refuse_updates = True
        with pytest.raises(EngineError, match="shape mismatch"):
            await engine.load_weights(WEIGHTS, 1)
        with pytest.raises(EngineUnavailableError, match="version 1 failed"):
            await engine.generate(ask(ids(9)))
        with pytest.raises(EngineUnavailableError, match="version 1 failed"):
            await engine.score(ids(9))
        fake.refuse_updates, fake.keep_cache = False, True
        with pytest.raises(EngineError, match="prefix cache survived"):
            await engine.load_weights(WEIGHTS, 1)
        fake.keep_cache = False
        await engine.load_weights(WEIGHTS, 1)
        assert (await engine.generate(ask(ids(9)))).weight_versions == (1,)

    run(scenario)


class MinusOne:
    """A reference by which every token has log-prob -1, as the stand-in's have."""

    def score(self, weights: object, token_ids: np.ndarray) -> np.ndarray:
        return np.full(len(token_ids) - 1, -1.0, np.float32)


@pytest.mark.parametrize("wrong", [set(), {0}, {0, 1}, {0, 2}, {0, 1, 2}])
def test_one_scored_prompt_may_differ_by_a_tie_and_two_may_not(wrong: set[int]) -> None:
    async def scenario() -> None:
        fake = FakeSGLang(wrong_scores=wrong)
        engine = await connect(fake, reference=MinusOne())
        if len(wrong) < 2:
            await engine.load_weights(WEIGHTS, 1)
            assert (await engine.generate(ask(ids(9)))).weight_versions == (1,)
        else:
            with pytest.raises(EngineError, match=r"did not arrive.*by 5\.00e-01"):
                await engine.load_weights(WEIGHTS, 1)
        assert fake.scored == (3 if wrong else 1)

    run(scenario)
