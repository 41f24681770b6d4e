"""Rollouts in the order of their steps, and what else may run while one is in progress.

With ``train.overlap_rollout`` engine and trainer work at the same time::

    engine   rollout 1 │ rollout 2 ── weights 1 ── rollout 3 ── weights 2 ── ...
    trainer            │ update 1  ──    │      ── update 2  ──    │      ── ...

Weights change only between two rollouts, so one version still samples a whole step: the one before
the newest. Nothing depends on which of the two is faster.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from agent_rl.config import TrainConfig
from agent_rl.metrics.step_times import StepClock
from agent_rl.types import Group, release_rows

_T = TypeVar("_T")


@dataclass(frozen=True)
class _Collected:
    """The groups of a step, and how long their rollout took."""

    groups: list[Group]
    seconds: float


class Batch:
    """One step's groups, and the work of that step which must keep clear of rollouts.

    A cancellation that comes while or after the weights move ends what is being awaited, and is
    raised at the end of the step: until then the step can be recorded.
    """

    def __init__(
        self, rollouts: RolloutAhead, collected: _Collected, clock: StepClock, *, in_thread: bool
    ) -> None:
        self._rollouts, self._collected, self._clock = rollouts, collected, clock
        self._in_thread = in_thread
        self._cancelled: asyncio.CancelledError | None = None

    @property
    def groups(self) -> list[Group]:
        """The step's groups, in the order of their tasks."""
        return self._collected.groups

    async def beside_rollout(self, work: Callable[[], _T]) -> _T:
        """Run ``work`` to its end; where the next rollout is in progress, in a thread."""
        return await in_thread(work) if self._in_thread else work()

    async def between_rollouts(self, work: Callable[[], Awaitable[_T]]) -> _T | None:
        """Await ``work`` while no rollout is in progress; None where the step was cancelled."""
        if self._cancelled is not None:
            return None
        try:
            started = time.monotonic()
            await self._rollouts.settle()
            self._clock.waited_since(started)
            return await work()
        except asyncio.CancelledError as error:
            self._cancelled = error
            return None

    def times(self) -> dict[str, float]:
        """Return where the step's time went until now."""
        return self._clock.times(self.groups, self._collected.seconds)

    def raise_cancelled(self) -> None:
        """Raise the cancellation that the step put off, if there was one."""
        if self._cancelled is not None:
            raise self._cancelled


class RolloutAhead:
    """Collects steps one after the other, at most one of them before it is asked for.

    Leaving it cancels a rollout in progress and gives back the rows of one that nobody took.

    Args:
        collect: the groups of a step, with the weights that the engine has.
        train: its ``overlap_rollout`` and ``steps`` say which steps begin early.
    """

    def __init__(
        self, collect: Callable[[int], Awaitable[list[Group]]], train: TrainConfig
    ) -> None:
        self._collect, self._train = collect, train
        self._begun: tuple[int, asyncio.Task[_Collected]] | None = None

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

    @asynccontextmanager
    async def take(self, step: int) -> AsyncIterator[Batch]:
        """Wait for the groups of ``step`` and lend them; their rows are given back at the end.

        Raises what the rollout raised, also one that failed while the trainer was at work, and at
        the end the cancellation that the step put off.
        """
        clock, started = StepClock(), time.monotonic()
        collected = await self._collected_for(step)
        clock.waited_since(started)
        overlaps = self._train.overlap_rollout
        batch = Batch(self, collected, clock, in_thread=overlaps)
        try:
            if overlaps and step < self._train.steps:
                self._begin(step + 1)
            yield batch
        finally:
            release_rows(batch.groups)
        batch.raise_cancelled()

    async def settle(self) -> None:
        """Wait until no rollout is in progress; how it ended is told by :meth:`take`."""
        if self._begun is not None:
            await asyncio.wait({self._begun[1]})

    def _begin(self, step: int) -> None:
        assert self._begun is None  # what was begun before has been taken
        self._begun = step, asyncio.create_task(self._timed(step))

    async def _collected_for(self, step: int) -> _Collected:
        if self._begun is None:
            self._begin(step)
        assert self._begun is not None
        begun, task = self._begun
        assert begun == step
        collected = await asyncio.shield(task)  # cancelled by leaving, which waits for its end
        self._begun = None
        return collected

    async def _timed(self, step: int) -> _Collected:
        started = time.monotonic()
        groups = await self._collect(step)
        return _Collected(groups, time.monotonic() - started)


async def in_thread(work: Callable[[], _T]) -> _T:
    """Run ``work`` in a thread to its end: it cannot be stopped, and nobody may go on beside it.

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
