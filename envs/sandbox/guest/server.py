"""The server inside a sandbox: forks one child for each job and relays what it wrote.

It holds no request in memory, runs no code of the agent's, and trusts nothing that comes back.
With namespaces every job is the first process of a PID namespace of its own, so killing it kills
everything it started: daemons, ``setsid`` children and those that ignore signals. Without them
(kind ``process``) orphans are adopted and swept.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from . import jobs, kernel, relay
from .job import Channels, JobConfig, fresh_folder
from .protocol import KILL, READY, REQUEST_BYTES, Reply, Request, read_exactly, write_all

CONTROL_IN, CONTROL_OUT = 0, 1
_STATUS_CAP_BYTES = 64 << 10
_REPORT_CAP_BYTES = 4 << 20

# What tests commonly import: paid once here instead of in every job.
_PRELOAD = (
    "bisect",
    "collections",
    "copy",
    "dataclasses",
    "functools",
    "heapq",
    "itertools",
    "json",
    "math",
    "operator",
    "random",
    "re",
    "string",
    "typing",
)


@dataclass(frozen=True)
class ServerConfig:
    """The configuration that the host gives the server at start."""

    jobs: JobConfig
    binds: tuple[tuple[str, str], ...] = ()  # unshare only: (host folder, path inside)
    masked: tuple[str, ...] = ()  # unshare only: folders hidden behind an empty tmpfs


def serve(config: ServerConfig) -> None:
    """Answer requests until the host closes the pipe. Mutates this process's mount namespace."""
    if config.jobs.namespaces:
        _prepare_namespaces(config)
    else:
        kernel.set_child_subreaper()
    os.makedirs(config.jobs.workspace, exist_ok=True)
    for name in _PRELOAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a child's collector does not touch, and so does not copy, these pages
    write_all(CONTROL_OUT, READY)
    while True:
        try:
            prefix = read_exactly(CONTROL_IN, REQUEST_BYTES)
        except EOFError:
            return
        if prefix == KILL:
            continue  # it crossed the end of its job
        if not _run(config.jobs, Request.unpack(prefix)):
            return


def _prepare_namespaces(config: ServerConfig) -> None:
    if config.masked:
        _mask_host_folders(config)
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    # No user namespace can be made below ours: code under test never becomes root of one.
    Path("/proc/sys/user/max_user_namespaces").write_text("0")


def _mask_host_folders(config: ServerConfig) -> None:
    """Make host folders read-only or empty; the interpreter is put back where it was."""
    kernel.mount("", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    keep = "/dev/shm"
    kernel.mount_tmpfs(keep, 1 << 20, 64)
    for index, (source, _) in enumerate(config.binds):
        os.mkdir(f"{keep}/{index}")
        kernel.mount(source, f"{keep}/{index}", "", kernel.MS_BIND | kernel.MS_REC)
    kernel.make_read_only("/")
    for folder in config.masked:
        if os.path.isdir(folder) and not os.path.islink(folder):
            kernel.mount_tmpfs(folder, config.jobs.tmp_bytes, config.jobs.tmp_inodes)
    for index, (_, target) in enumerate(config.binds):
        if not os.path.isdir(target):
            os.makedirs(target)
        kernel.mount(f"{keep}/{index}", target, "", kernel.MS_BIND | kernel.MS_REC)
    for folder in config.masked:
        if folder != "/tmp" and os.path.isdir(folder):
            kernel.make_read_only(folder)
    kernel.mount_tmpfs(keep, config.jobs.tmp_bytes, config.jobs.tmp_inodes)


def _run(config: JobConfig, request: Request) -> bool:
    """Run one job and answer it exactly once.

    False when the host has gone or the pipe is out of step.
    """
    started = time.monotonic()
    pipes = {name: os.pipe() for name in ("output", "status", "report")}
    pid = _fork(config, request, {name: pair[1] for name, pair in pipes.items()})
    for _, write_end in pipes.values():
        os.close(write_end)
    output, status, report = (pair[0] for pair in pipes.values())
    buffers = {
        output: relay.BoundedBuffer(request.output_cap_bytes),
        status: relay.BoundedBuffer(_STATUS_CAP_BYTES),
        report: relay.BoundedBuffer(_REPORT_CAP_BYTES),
    }

    def answer(exit_code: int) -> None:
        reply = Reply(
            exit_code=exit_code,
            timed_out=waited.timed_out,
            cpu_exceeded=waited.cpu_exceeded,
            seconds=time.monotonic() - started,
            total_output_bytes=buffers[output].total_bytes,
            output=buffers[output].kept(),
            status=buffers[status].kept()[len(READY) :],
            report=buffers[report].kept(),
        )
        write_all(CONTROL_OUT, reply.pack())

    waited = relay.wait_for(
        pid,
        buffers,
        status_fd=status,
        last_fd=output if request.until_output_ends else None,
        control_fd=CONTROL_IN,
        wall_s=request.wall_s,
        cpu_s=request.cpu_s,
    )
    exit_code = 0
    if not waited.output_ended:
        exit_code = _end(config, pid)
    relay.drain(buffers)  # the output may have ended in the same moment as the status was written
    in_step = not waited.host_gone and buffers[status].kept().startswith(READY)
    if in_step:
        answer(exit_code)
    if waited.output_ended:
        _end(config, pid)  # taking the namespaces down need not keep the host waiting
    for fd in buffers:
        os.close(fd)
    return in_step


def _end(config: JobConfig, pid: int) -> int:
    """Kill the job with all it started; returns the exit code of its first process."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _, wait_status = os.waitpid(pid, 0)  # returns once its whole PID namespace is dead
    if not config.namespaces:
        _sweep_descendants()
        shutil.rmtree(fresh_folder(config.workspace, pid), ignore_errors=True)
    return os.waitstatus_to_exitcode(wait_status)


def _fork(config: JobConfig, request: Request, write_ends: dict[str, int]) -> int:
    """Fork the job's process: first of its own PID namespace when there are namespaces."""
    if not config.namespaces:
        pid = os.fork()
    else:
        own_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        try:
            kernel.unshare(kernel.CLONE_NEWPID)
            pid = os.fork()
            if pid:
                kernel.setns(own_namespace, kernel.CLONE_NEWPID)
        finally:
            os.close(own_namespace)
    if pid == 0:
        jobs.run(config, request, Channels(**write_ends))  # never returns
    return pid


def _sweep_descendants() -> None:
    """Kill and reap every process below this one, adopted orphans included."""
    while children := _children_of(os.getpid()):
        for pid in _descendants(children):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _descendants(pids: list[int]) -> list[int]:
    found: list[int] = []
    queue = list(pids)
    while queue:
        pid = queue.pop()
        found.append(pid)
        queue += _children_of(pid)
    return found


def _children_of(pid: int) -> list[int]:
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
