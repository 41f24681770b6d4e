"""Stopping on request: the first Ctrl-C ends the step in progress, the second one the process."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from types import FrameType
from typing import Any, TypeVar

_T = TypeVar("_T")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):  # noqa: N818 (an event, not an error)
    """The user asked to stop; completed steps are safe."""


def run_interruptible(work: Coroutine[Any, Any, _T]) -> _T:
    """Run ``work`` to its end; SIGINT or SIGTERM cancels it and raises ``Interrupted``.

    Cancelling lets ``work`` release sandboxes and save what is complete. A second signal falls
    through to the default handler and kills the process.
    """

    async def main() -> _T:
        task = asyncio.ensure_future(work)
        asked = False

        def ask(number: int, _: FrameType | None) -> None:
            nonlocal asked
            asked = True
            signal.signal(number, signal.default_int_handler)
            loop.call_soon_threadsafe(task.cancel)

        loop = asyncio.get_running_loop()
        before = {number: signal.signal(number, ask) for number in _SIGNALS}
        try:
            return await task
        except asyncio.CancelledError:
            if asked:
                raise Interrupted from None
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    return asyncio.run(main())
