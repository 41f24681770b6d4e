"""One signal ends the work cleanly, a second one at once, and neither leaves noise."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from agent_rl.run.interrupt import Interrupted, run_interruptible

SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def work(first: int | None, second: int | None, ended: list[str]) -> str:
    try:
        if first is not None:
            os.kill(os.getpid(), first)
            await asyncio.sleep(30)
    finally:
        if second is not None:
            os.kill(os.getpid(), second)
        await asyncio.sleep(0)
        ended.append("cleaned up")
    return "done"


@pytest.fixture(autouse=True)
def handlers_come_back():
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_work_that_nobody_interrupts_gives_its_result() -> None:
    assert run_interruptible(work(None, None, [])) == "done"


@pytest.mark.parametrize("first", SIGNALS)
def test_a_signal_lets_the_work_clean_up(first: int, caplog: pytest.LogCaptureFixture) -> None:
    ended: list[str] = []
    with pytest.raises(Interrupted):
        run_interruptible(work(first, None, ended))
    assert ended == ["cleaned up"]
    assert caplog.records == []


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("second", SIGNALS)
def test_a_second_signal_of_either_kind_ends_the_process_without_a_trace(
    first: int, second: int, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_interruptible(work(first, second, []))
    assert caplog.records == []


def test_a_signal_that_comes_too_late_changes_nothing() -> None:
    async def quick() -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return "done"

    assert run_interruptible(quick()) == "done"


def test_a_cancellation_of_its_own_is_no_interrupt() -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run_interruptible(cancelled())
