"""Stopping on request: the first Ctrl-C ends the step in progress, the second one the process."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from types import FrameType
from typing import Any, TypeVar, cast

_T = TypeVar("_T")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):  # noqa: N818 (an event, not an error)
    """The user asked to stop; completed steps are safe."""


def run_interruptible(work: Coroutine[Any, Any, _T]) -> _T:
    """Run ``work`` to its end; SIGINT or SIGTERM cancels it and raises ``Interrupted``.

    Cancelling lets ``work`` release sandboxes and save what is complete. A second signal falls
    through to the default handler and kills the process.
    """
    asked = stopped = False

    async def main() -> _T | None:
        nonlocal stopped
        task = asyncio.ensure_future(work)

        def ask(number: int, _: FrameType | None) -> None:
            nonlocal asked
            asked = True
            for each in _SIGNALS:
                signal.signal(each, signal.default_int_handler)
            loop.call_soon_threadsafe(task.cancel)

        loop = asyncio.get_running_loop()
        for each in _SIGNALS:
            signal.signal(each, ask)
        try:
            return await task
        except asyncio.CancelledError:
            if not asked:
                raise
            stopped = True  # and raised below: after a second signal nobody takes what this raises
            return None

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        result = asyncio.run(main())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if stopped:
        raise Interrupted
    return cast(_T, result)
