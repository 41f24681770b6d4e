"""A step's groups: bounded concurrency, deterministic seeds, failed members tried again.

tasks ─▶ group_size members each ─▶ run_trajectory ─▶ failed? wait, then again, max_retries times
                                                  └─▶ groups, in the order of the tasks
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from agent_rl.config.schema import AgentConfig, RolloutConfig
from agent_rl.errors import ConfigError, RolloutError
from agent_rl.protocols import Generator
from agent_rl.rollout.agent import run_trajectory
from agent_rl.rollout.chat import Renderer
from agent_rl.types import Group, Status, Trajectory
from envs.base import Env, Task
from routing_cache import RoutingCache


@dataclass(frozen=True)
class CollectProgress:
    """Progress of a step's rollout. ``num_skipped`` is known when everything is finished."""

    num_finished: int
    num_total: int
    num_failed: int = 0  # after all retries
    num_retries: int = 0
    num_skipped: int = 0  # groups with fewer valid members than rollout.min_valid_members


def member_seed(run_seed: int, step: int, task_id: str, repeat: int, member: int) -> int:
    """Return the sampling seed of one trajectory: the same in every run with the same inputs.

    ``repeat`` tells apart groups of one step that share a task.
    """
    text = f"{run_seed}/{step}/{task_id}/{repeat}/{member}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def retry_wait_s(limits: RolloutConfig, seed: int, attempt: int) -> float:
    """Return the seconds to wait before retry ``attempt`` (from 1).

    They double up to the limit, and are shortened by up to half at random, so that members which
    failed together do not return together.
    """
    whole = min(limits.retry_wait_s * 2.0 ** (attempt - 1), limits.retry_wait_max_s)
    return whole * random.Random(f"{seed}/{attempt}").uniform(0.5, 1.0)


def _ignore(progress: CollectProgress) -> None:
    del progress


@dataclass(frozen=True)
class GroupCollector:
    """Rolls out groups with one engine, one cache and one kind of environment.

    Args:
        cache: None records no routing.
        make_env: an unstarted environment for a task. Called on the event loop: it must not
            block, the work belongs in ``Env.reset``.
        executor: runs the environments' blocking calls; its size bounds the sandboxes in use.
        on_progress: told after every finished member and once at the end.
        sleep: waits before a retry; a stand-in for tests.
    """

    generator: Generator
    cache: RoutingCache | None
    renderer: Renderer
    agent: AgentConfig
    rollout: RolloutConfig
    group_size: int
    make_env: Callable[[Task], Env]
    executor: Executor
    run_seed: int = 0
    temperature: float = 1.0
    on_progress: Callable[[CollectProgress], None] = _ignore
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    def __post_init__(self) -> None:
        if self.cache is not None and self.cache.layout != self.generator.row_layout:
            raise ConfigError(
                [
                    f"routing cache and engine disagree on the rows: got {self.cache.layout}, "
                    f"expected {self.generator.row_layout}"
                ]
            )

    async def __call__(self, tasks: Sequence[Task], step: int, first_group: int = 0) -> list[Group]:
        """Roll out one group per task, in order, every member present; failed ones have no reward.

        Groups with too few valid members are returned too (counted as skipped in the last
        progress): who learns from what is decided later, and what failed stays visible.
        ``first_group`` numbers the groups of a step that collects more than once.

        Raises:
            RolloutError: more than ``max_failure_fraction`` of the trajectories failed for good;
                what still runs is cancelled first.
        """
        run = _Step(self, step, len(tasks) * self.group_size, first_group)
        members: list[asyncio.Task[Trajectory]] = []
        repeats: dict[str, int] = {}
        for index, task in enumerate(tasks):
            repeat = repeats[task.task_id] = repeats.get(task.task_id, -1) + 1
            members += [
                asyncio.create_task(run.member(task, index, repeat, m))
                for m in range(self.group_size)
            ]
        is_complete = False
        try:
            trajectories = await asyncio.gather(*members)
            is_complete = True
        finally:
            if not is_complete:
                await _abandon(members)
        groups = [
            Group(
                group_id=run.group_id(index),
                task_id=task.task_id,
                trajectories=trajectories[index * self.group_size : (index + 1) * self.group_size],
            )
            for index, task in enumerate(tasks)
        ]
        run.report_end(groups)
        return groups


class _Step:
    """Counters and limits of one collection in progress."""

    def __init__(
        self, collector: GroupCollector, step: int, num_total: int, first_group: int
    ) -> None:
        self._collector = collector
        self._step, self._first_group = step, first_group
        self._slots = asyncio.Semaphore(collector.rollout.concurrency)
        self._progress = CollectProgress(0, num_total)

    def group_id(self, index: int) -> str:
        return f"step{self._step}/group{self._first_group + index}"

    async def member(self, task: Task, index: int, repeat: int, member: int) -> Trajectory:
        """Roll out one member, again while it fails and retries are left.

        It waits in its slot: an overloaded daemon gets fewer requests then, not others instead.
        """
        limits = self._collector.rollout
        seed = member_seed(self._collector.run_seed, self._step, task.task_id, repeat, member)
        async with self._slots:
            attempt = 0
            trajectory = await self._attempt(task, index, member, seed, attempt)
            while trajectory.status is Status.FAILED and attempt < limits.max_retries:
                attempt += 1
                self._report(num_retries=self._progress.num_retries + 1)
                await self._collector.sleep(retry_wait_s(limits, seed, attempt))
                trajectory = await self._attempt(task, index, member, seed, attempt)
        trajectory.details["attempts"] = attempt + 1
        has_failed = trajectory.status is Status.FAILED
        self._report(
            num_finished=self._progress.num_finished + 1,
            num_failed=self._progress.num_failed + has_failed,
        )
        if self._progress.num_failed > limits.max_failure_fraction * self._progress.num_total:
            raise RolloutError(
                f"too many trajectories failed: got {self._progress.num_failed} of "
                f"{self._progress.num_total} after {limits.max_retries} retries, expected at most "
                f"rollout.max_failure_fraction={limits.max_failure_fraction}; the last error was: "
                f"{trajectory.error}"
            )
        return trajectory

    async def _attempt(
        self, task: Task, index: int, member: int, seed: int, attempt: int
    ) -> Trajectory:
        collector = self._collector
        return await run_trajectory(
            collector.make_env(task),
            collector.generator,
            collector.cache,
            collector.renderer,
            collector.agent,
            group_id=self.group_id(index),
            member=member,
            seed=seed,
            executor=collector.executor,
            temperature=collector.temperature,
            session_id=f"{self.group_id(index)}/{member}/{attempt}",
        )

    def report_end(self, groups: Sequence[Group]) -> None:
        needed = self._collector.rollout.min_valid_members
        self._report(num_skipped=sum(len(group.valid) < needed for group in groups))

    def _report(self, **changes: int) -> None:
        self._progress = replace(self._progress, **changes)
        self._collector.on_progress(self._progress)


async def _abandon(members: Sequence[asyncio.Task[Trajectory]]) -> None:
    """Cancel what still runs, wait for it, and give back the rows that nobody will use."""
    for task in members:
        task.cancel()
    for result in await asyncio.gather(*members, return_exceptions=True):
        if isinstance(result, Trajectory):
            result.release_rows()
