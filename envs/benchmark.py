"""What sandboxed tests cost here: ``python -m envs.benchmark [kind]``."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from envs.base import Task
from envs.grading.case_runner import CaseRunner
from envs.grading.grade import grade
from envs.sandbox.choose import choose
from envs.sandbox.launch import SandboxSpec
from envs.sandbox.pool import SandboxPool
from envs.sandbox.sandbox import WorkerSandbox
from envs.swe import SweEnv
from envs.tasks.repair import take

_NUM_TASKS = 200
_NUM_STARTS = 10


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one kind of work: of a call, and between two results."""

    name: str
    median_ms: float
    p90_ms: float
    per_result_ms: float

    def __str__(self) -> str:
        return (
            f"{self.name:<34} median {self.median_ms:7.2f}   p90 {self.p90_ms:7.2f}"
            f"   per result {self.per_result_ms:7.2f}"
        )


def measure(
    name: str, work: Callable[[Task], object], tasks: Sequence[Task], num_threads: int
) -> Timing:
    """Do ``work`` on every task with ``num_threads`` threads."""

    def timed(task: Task) -> float:
        started = time.perf_counter()
        work(task)
        return (time.perf_counter() - started) * 1e3

    with ThreadPoolExecutor(num_threads) as threads:
        started = time.perf_counter()
        times = sorted(threads.map(timed, tasks))
        whole = (time.perf_counter() - started) * 1e3
    p90 = times[int(len(times) * 0.9)]
    label = f"{name}, {num_threads} thread{'s' * (num_threads > 1)}"
    return Timing(label, statistics.median(times), p90, whole / len(tasks))


def run(kind: str) -> list[Timing]:
    """All measurements for one kind of sandbox (``auto`` chooses)."""
    spec = choose(SandboxSpec(kind), allow_unsafe=True)
    tasks = [task.to_task() for task in take(1, "train", _NUM_TASKS)]
    pool = SandboxPool(spec, num_workers=2)
    runner = CaseRunner(pool)

    def visible_tests(task: Task) -> None:
        env = SweEnv(task, runner)
        env.reset()
        env.step("test")

    def start_and_stop(_: Task) -> None:
        WorkerSandbox(spec).close()

    with ThreadPoolExecutor(2) as threads:  # both workers are up before anything is measured
        list(threads.map(visible_tests, tasks[:8]))
    timings: list[Timing] = []
    for num_threads in (1, 2):
        timings.append(measure("visible tests", visible_tests, tasks, num_threads))
        gold = measure("grading", lambda t: grade(t, t.solution, runner), tasks, num_threads)
        timings.append(gold)
    pool.close()
    timings.append(measure("sandbox start and stop", start_and_stop, tasks[:_NUM_STARTS], 1))
    return timings


if __name__ == "__main__":
    for timing in run(sys.argv[1] if len(sys.argv) > 1 else "auto"):
        print(timing)
