"""The rollout of the next step, beside the update of this one.

With ``train.overlap_rollout`` engine and trainer work at the same time::

    engine   rollout 1 │ rollout 2 ── weights 1 ── rollout 3 ── weights 2 ── ...
    trainer            │ update 1  ──    │      ── update 2  ──    │      ── ...

Weights change only between two rollouts, so one version still samples a whole step: the one before
the newest. Nothing depends on which of the two is faster.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from agent_rl.types import Group

_T = TypeVar("_T")


@dataclass(frozen=True)
class Collected:
    """A step's groups, and how long their rollout took."""

    groups: list[Group]
    seconds: float


class RolloutAhead:
    """Collects steps one after the other, at most one of them before it is asked for.

    Leaving it cancels a rollout in progress and gives back the rows of one that nobody took.

    Args:
        collect: the groups of a step, with the weights that the engine has.
    """

    def __init__(self, collect: Callable[[int], Awaitable[list[Group]]]) -> None:
        self._collect = collect
        self._begun: tuple[int, asyncio.Task[Collected]] | None = None

    async def __aenter__(self) -> RolloutAhead:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._begun is None:
            return
        (_, task), self._begun = self._begun, None
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled() and task.exception() is None:
            release_rows(task.result().groups)

    def begin(self, step: int) -> None:
        """Start collecting ``step``; the last one that was begun must have been taken."""
        assert self._begun is None
        self._begun = step, asyncio.create_task(self._timed(step))

    async def take(self, step: int) -> Collected:
        """The groups of ``step``: what was begun for it, else collected now.

        Raises what the rollout raised, also one that failed while the trainer was at work.
        """
        if self._begun is None:
            self.begin(step)
        assert self._begun is not None
        begun, task = self._begun
        assert begun == step
        collected = await asyncio.shield(task)  # cancelled by leaving, which waits for its end
        self._begun = None
        return collected

    async def settle(self) -> float:
        """Wait until no rollout is in progress; how it ended is told by :meth:`take`. Seconds."""
        started = time.monotonic()
        if self._begun is not None:
            await asyncio.wait({self._begun[1]})
        return time.monotonic() - started

    async def _timed(self, step: int) -> Collected:
        started = time.monotonic()
        groups = await self._collect(step)
        return Collected(groups, time.monotonic() - started)


async def in_thread(work: Callable[[], _T]) -> _T:
    """``work()`` in a thread, to its end: it cannot be stopped, and nobody may go on beside it.

    A caller that is cancelled meanwhile, also twice, gets the result and is cancelled again at its
    next await.
    """
    # A future: tasks would be cancelled, and so be over before the work, when the loop is closed.
    done = asyncio.get_running_loop().run_in_executor(None, work)
    is_cancelled = False
    while not done.done():
        try:
            await asyncio.wait({done})
        except asyncio.CancelledError:
            is_cancelled = True
    result = done.result()
    caller = asyncio.current_task()
    if is_cancelled and caller is not None:
        caller.cancel()
    return result


class CancelLater:
    """A cancellation inside a block ends the block, and is raised when there is time for it."""

    def __init__(self) -> None:
        self._cancelled: asyncio.CancelledError | None = None

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled is not None

    def __enter__(self) -> CancelLater:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(error, asyncio.CancelledError):
            return False
        self._cancelled = error
        return True

    def raise_now(self) -> None:
        """Raise the cancellation, if there was one."""
        if self._cancelled is not None:
            raise self._cancelled


def release_rows(groups: list[Group]) -> None:
    """Give the routing rows of these groups back to the cache."""
    for trajectory in (t for group in groups for t in group.trajectories):
        if trajectory.routed_experts is not None:
            trajectory.routed_experts.release()
