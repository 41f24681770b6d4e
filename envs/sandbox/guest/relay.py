"""Waiting for a job: bounded output, deadlines, and the end of its first process."""

from __future__ import annotations

import errno
import os
import select
import time
from dataclasses import dataclass

from .protocol import KILL, read_exactly

_CHUNK_BYTES = 1 << 16
_CPUCLOCK_SCHED = 2


class BoundedBuffer:
    """A buffer of the first and the last half of a stream within ``cap_bytes``; counts the rest."""

    def __init__(self, cap_bytes: int) -> None:
        self.total_bytes = 0
        self._head_cap = cap_bytes - cap_bytes // 2
        self._tail_cap = cap_bytes // 2
        self._head = bytearray()
        self._tail = bytearray()

    def feed(self, data: bytes) -> None:
        """Add data; memory stays below twice the cap plus one chunk."""
        self.total_bytes += len(data)
        room = self._head_cap - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > self._tail_cap + _CHUNK_BYTES:
            del self._tail[: len(self._tail) - self._tail_cap]

    def kept(self) -> bytes:
        """Return head and tail, joined without a mark."""
        tail = self._tail[-self._tail_cap :] if self._tail_cap else bytearray()
        return bytes(self._head + tail)


@dataclass(frozen=True)
class Waited:
    """The reason why the wait for a job ended."""

    timed_out: bool = False
    cpu_exceeded: bool = False
    output_ended: bool = False  # the stream that decides has ended
    killed: bool = False  # by a KILL frame
    host_gone: bool = False


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a running process of ours, threads included; 0.0 once it has gone."""
    try:
        return time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ESRCH):
            return 0.0
        raise


def wait_for(
    pid: int,
    streams: dict[int, BoundedBuffer],
    *,
    status_fd: int,
    last_fd: int | None,
    control_fd: int,
    wall_s: float,
    cpu_s: float,
) -> Waited:
    """Drain ``streams`` until ``pid`` or ``last_fd`` ends, a limit is hit or the host says stop.

    The CPU budget is read from outside the process, so code that resets its own timers gains
    nothing, and a slow machine does not turn a short computation into a timeout. ``control_fd``
    belongs to the child until the first status byte says that it has read its request.
    """
    pidfd = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(control_fd, 0)  # hang-up only, so far
    for fd in streams:
        os.set_blocking(fd, False)
        poll.register(fd, select.POLLIN)
    deadline = time.monotonic() + wall_s
    try:
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return Waited(timed_out=True)
            if cpu_s:
                cpu_left = cpu_s - cpu_seconds(pid)
                if cpu_left <= 0:
                    return Waited(cpu_exceeded=True)
                left = min(left, cpu_left)
            events = dict(poll.poll(left * 1000 + 1))
            if control_fd in events:
                return _stop_reason(control_fd, events[control_fd])
            for fd in streams:
                if fd in events and not _read_once(fd, streams[fd]):
                    poll.unregister(fd)
                    if fd == last_fd:
                        return Waited(output_ended=True)
                elif fd == status_fd and fd in events:
                    poll.modify(control_fd, select.POLLIN)
            if pidfd in events:
                return Waited()
    finally:
        os.close(pidfd)


def _stop_reason(control_fd: int, events: int) -> Waited:
    """Read what the host says: only a KILL frame may come while a job runs."""
    if events & select.POLLIN and read_exactly(control_fd, len(KILL)) == KILL:
        return Waited(killed=True)
    return Waited(host_gone=True)


def drain(streams: dict[int, BoundedBuffer]) -> None:
    """Read what is waiting in the pipes, without blocking."""
    for fd, buffer in streams.items():
        while _read_once(fd, buffer):
            pass


def _read_once(fd: int, buffer: BoundedBuffer) -> bool:
    """Read one chunk; False at the end of the stream or when nothing is waiting."""
    try:
        data = os.read(fd, _CHUNK_BYTES)
    except BlockingIOError:
        return False
    buffer.feed(data)
    return bool(data)
