"""One job, in the forked child: take the request, shut the doors, then do the work.

Everything here happens before any code of the agent's runs in this process. ``run`` never
returns: it ends the process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from . import case_job, exec_job, file_jobs, kernel
from .job import Channels, Job, JobConfig, fresh_folder, report_failure
from .protocol import READY, Request, read_exactly, unpack_body, write_all

_SETUP_FAILED = 70
_WRITABLE = ("/tmp", "/dev/shm")  # all that a job can write to


_OPERATIONS: dict[str, Callable[[Job], None]] = {
    "cases": case_job.run,
    "exec": exec_job.run,
    "read": file_jobs.read,
    "write": file_jobs.write,
    "delete": file_jobs.delete,
    "snapshot": file_jobs.snapshot,
}


def run(config: JobConfig, request: Request, channels: Channels) -> None:
    """Carry out one request and end this process."""
    exit_code = _SETUP_FAILED
    try:
        body = read_exactly(0, request.body_bytes)
        write_all(channels.status, READY)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        header, blobs = unpack_body(body)
        del body
        operation = _OPERATIONS[header["op"]]
        _enter(config, fresh=request.fresh, see_processes=header["op"] == "exec")
        operation(Job(config, channels, header, blobs))
        exit_code = 0
    except BaseException as error:  # the process boundary: a failure here becomes a status
        report_failure(channels.status, "setup", error)
    finally:
        os._exit(exit_code)


def _enter(config: JobConfig, *, fresh: bool, see_processes: bool) -> None:
    """Take own mounts and limits and drop privileges.

    Then the current folder is the work folder.
    """
    # When memory runs out the kernel takes a job, never the server.
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    if config.namespaces:
        kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC)
        with open("/proc/sys/kernel/shmall", "w") as file:
            file.write(str(config.tmp_bytes // os.sysconf("SC_PAGE_SIZE")))
        if fresh:
            _mount_fresh(config)
        flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
        if see_processes:
            kernel.mount("proc", "/proc", "proc", flags)
        else:
            kernel.mount("tmpfs", "/proc", "tmpfs", flags | kernel.MS_RDONLY, "size=0,nr_inodes=1")
    workspace = config.workspace
    if fresh and not config.namespaces:
        workspace = fresh_folder(workspace, os.getpid())
    _enter_folder(workspace)
    os.setsid()
    kernel.apply_limits(config.limits)
    if config.namespaces:
        kernel.drop_capabilities()
    else:
        kernel.set_no_new_privileges()


def _mount_fresh(config: JobConfig) -> None:
    """Mount new temporary folders; what must stay readable below the old ones is put back."""
    kept = [(os.open(path, os.O_PATH | os.O_CLOEXEC), path) for path in config.keep_readable]
    for folder in _WRITABLE:
        kernel.mount_tmpfs(folder, config.tmp_bytes, config.tmp_inodes)
    for fd, path in kept:
        os.makedirs(path)
        kernel.mount(f"/proc/self/fd/{fd}", path, "", kernel.MS_BIND | kernel.MS_REC)
        os.close(fd)


def _enter_folder(workspace: str) -> None:
    """Enter a real and usable work folder, whatever an earlier job has put in its place."""
    if os.path.islink(workspace) or not os.path.isdir(workspace):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(workspace)
        os.makedirs(workspace)
    os.chmod(workspace, 0o755)
    os.chdir(workspace)
