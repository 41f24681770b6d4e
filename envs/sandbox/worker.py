"""A started server and the host's end of its control pipe."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import threading
import time

from envs.errors import InfrastructureError
from envs.sandbox.cgroup import Cgroup, make_cgroup
from envs.sandbox.guest.protocol import KILL, READY, Reply, Request
from envs.sandbox.launch import LAUNCHERS, UNSAFE_KINDS, SandboxSpec
from envs.sandbox.scratch import Scratch

_START_TIMEOUT_S = 20.0
_REPLY_GRACE_S = 10.0  # past a job's own deadline the server itself must be stuck
_STOP_TIMEOUT_S = 2.0
_SERVER_BYTES = 96 << 20  # the server's share of the group's memory, beside one job's
_SERVER_PROCESSES = 12


class WorkerDiedError(InfrastructureError):
    """A server inside the sandbox that is gone or out of step; the worker must be replaced."""


class Worker:
    """One sandbox with its server. Jobs go one at a time; ``kill_job`` may come from any thread."""

    def __init__(self, spec: SandboxSpec) -> None:
        """Start it and wait until it answers. Raises InfrastructureError with what it printed."""
        self._scratch = Scratch()
        self._log = self._scratch.path / "log"
        self._group = self._make_group(spec)
        self._send_lock = threading.Lock()
        self._running = False
        try:
            procs_files = self._group.procs_files if self._group else ()
            launch = LAUNCHERS[spec.kind](spec, str(self._scratch.path), procs_files)
            self.workspace = launch.workspace
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    launch.argv,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    cwd="/",
                    env=launch.environment,
                    start_new_session=True,
                )
        except BaseException:
            self._release()
            raise
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        os.set_blocking(self._stdout.fileno(), False)
        self._await_ready(spec)

    @property
    def pid(self) -> int:
        """The outermost process of the sandbox, on the host."""
        return self._process.pid

    def oom_kills(self) -> int:
        return self._group.oom_kills() if self._group else 0

    def run(self, request: Request, body: bytes) -> Reply:
        """Run one job. Raises WorkerDiedError; the worker is of no more use then."""
        deadline = time.monotonic() + request.wall_s + _REPLY_GRACE_S
        try:
            with self._send_lock:
                self._running = True
                self._write(request.pack() + body, deadline)
            return Reply.read(lambda size: self._read(size, deadline))
        except (OSError, EOFError, TimeoutError) as error:
            self.close()
            raise WorkerDiedError(
                f"the sandbox server is gone: got={error} expected=a reply;"
                f" it printed {self._printed()!r}"
            ) from error
        finally:
            self._running = False

    def kill_job(self) -> None:
        """End the job in progress, if there is one."""
        with self._send_lock:
            if self._running:
                with contextlib.suppress(OSError, ValueError):
                    self._write(KILL, time.monotonic() + 1.0)

    def close(self) -> None:
        """Hang up, wait, then kill. Idempotent."""
        with contextlib.suppress(OSError):
            self._stdin.close()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stdout.close()
        self._release()

    def _make_group(self, spec: SandboxSpec) -> Cgroup | None:
        if spec.kind in UNSAFE_KINDS or os.geteuid() != 0:
            return None
        limits = spec.limits
        memory = limits.memory_bytes + limits.tmp_bytes + _SERVER_BYTES
        return make_cgroup(self._scratch.name, memory, limits.max_processes + _SERVER_PROCESSES)

    def _await_ready(self, spec: SandboxSpec) -> None:
        try:
            self._read(len(READY), time.monotonic() + _START_TIMEOUT_S)
        except (OSError, EOFError, TimeoutError) as error:
            printed = self._printed()
            self._process.kill()
            self.close()
            raise InfrastructureError(
                f"a {spec.kind} sandbox did not start: got={error},"
                f" expected an answer within {_START_TIMEOUT_S} s; it printed {printed!r}"
            ) from error

    def _printed(self) -> str:
        with contextlib.suppress(OSError):
            return self._log.read_bytes()[-1000:].decode(errors="replace").strip()
        return ""

    def _release(self) -> None:
        if self._group is not None:
            self._group.remove()
        self._scratch.remove()

    def _write(self, data: bytes, deadline: float) -> None:
        fd, view = self._stdin.fileno(), memoryview(data)
        while view:
            _wait(fd, select.POLLOUT, deadline)
            with contextlib.suppress(BlockingIOError):
                view = view[os.write(fd, view) :]

    def _read(self, size: int, deadline: float) -> bytes:
        fd, parts, missing = self._stdout.fileno(), list[bytes](), size
        while missing:
            _wait(fd, select.POLLIN, deadline)
            part = os.read(fd, min(missing, 1 << 20))
            if not part:
                raise EOFError("the control pipe closed")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)


def _wait(fd: int, events: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(fd, events)
    left = deadline - time.monotonic()
    if left <= 0 or not poll.poll(left * 1000):
        raise TimeoutError("no sign of life before the deadline")
