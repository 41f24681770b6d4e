"""Warm sandboxes for short jobs: each job gets namespaces and a work folder of its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from envs.errors import InfrastructureError
from envs.sandbox.guest.protocol import Reply, Request
from envs.sandbox.launch import SandboxSpec, plugin_folder
from envs.sandbox.worker import Worker, WorkerDiedError

_ATTEMPTS = 2


class SandboxPool:
    """At most ``num_workers`` servers, started when first needed, replaced when they die.

    Thread-safe: a call waits while all workers are busy. A server that dies under a job is the
    machinery's failure, since code under test has no way to reach it; the job is tried once more
    on a new one and then raises.

    Example:
        >>> pool = SandboxPool(SandboxSpec("bubblewrap"), num_workers=2)
        >>> reply, oom_kills = pool.run(*exec_job(["true"], timeout_s=5, output_cap_bytes=100))
    """

    def __init__(
        self,
        spec: SandboxSpec,
        num_workers: int,
        start: Callable[[SandboxSpec], Worker] = Worker,
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"a pool needs workers: got={num_workers} expected at least 1")
        self._spec, self._start = spec, start
        self._slots = threading.BoundedSemaphore(num_workers)
        self._lock = threading.Lock()
        self._idle: deque[Worker] = deque()  # longest idle first: it has long cleaned up
        self._closed = False
        self.num_started = 0
        self.num_died = 0

    @property
    def plugin_folder(self) -> str:
        """The folder of the pytest plugin, as seen from inside."""
        return plugin_folder(self._spec.kind)

    def run(self, request: Request, body: bytes) -> tuple[Reply, int]:
        """Run one job; returns its reply and how many of its processes the memory group killed.

        Raises InfrastructureError when no worker can be started or two died under the job.
        """
        with self._slots:
            for attempt in range(_ATTEMPTS):
                worker = self._take()
                before = worker.oom_kills()
                try:
                    reply = worker.run(request, body)
                except WorkerDiedError:
                    with self._lock:
                        self.num_died += 1
                    if attempt == _ATTEMPTS - 1:
                        raise
                    continue
                oom_kills = worker.oom_kills() - before
                self._give_back(worker)
                return reply, oom_kills
        raise AssertionError("unreachable")

    def warm_up(self) -> None:
        """Start one worker now, so that a sandbox that cannot start is known early."""
        with self._slots:
            self._give_back(self._take())

    def close(self) -> None:
        """Stop every idle worker; busy ones stop when their job ends. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, deque()
        for worker in idle:
            worker.close()

    def _take(self) -> Worker:
        with self._lock:
            if self._closed:
                raise InfrastructureError("the sandbox pool is closed: got=a job expected=none")
            if self._idle:
                return self._idle.popleft()
            self.num_started += 1
        return self._start(self._spec)

    def _give_back(self, worker: Worker) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(worker)
                return
        worker.close()
