"""A command: this process stays as the init of its PID namespace and reports how it ended."""

from __future__ import annotations

import json
import os
import signal

from . import kernel
from .job import Job, write_files
from .protocol import write_all

REPORT_FD = 3
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126


def run(job: Job) -> None:
    """Start the command, reap whatever ends, write ``{"exit": code}`` when the command does."""
    write_files(job.header["paths"], job.blobs[1:])
    stdin = os.memfd_create("stdin")
    write_all(stdin, job.blobs[0])
    os.lseek(stdin, 0, os.SEEK_SET)
    kernel.set_undumpable()  # the command shall not write to our status pipe behind our back
    command = os.fork()
    if command == 0:
        _become_command(job, stdin)
    os.close(stdin)
    os.close(job.channels.output)
    os.close(job.channels.report)
    while True:
        pid, wait_status = os.wait()
        if pid == command:
            break
    code = os.waitstatus_to_exitcode(wait_status)
    message = {"exit": code if code >= 0 else 128 - code}
    write_all(job.channels.status, json.dumps(message).encode())


def _become_command(job: Job, stdin: int) -> None:
    """Become the command; never returns.

    The status pipe is closed at exec, so the command cannot forge its end."""
    argv: list[str] = job.header["argv"]
    for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored_by_python, signal.SIG_DFL)
    try:
        os.chdir(job.header["cwd"])
        os.dup2(stdin, 0)
        os.dup2(job.channels.output, 1)
        os.dup2(job.channels.output, 2)
        if job.header["wants_report"]:
            os.dup2(job.channels.report, REPORT_FD)
            os.set_inheritable(REPORT_FD, True)  # dup2 onto itself would not
        os.execvpe(argv[0], argv, {**job.config.environment, **job.header["env"]})
    except (OSError, ValueError) as error:  # ValueError: a NUL byte, a lone surrogate
        os.write(2, f"cannot run {argv[0]!a}: {error!a}\n".encode())
        os._exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE)
    finally:
        os._exit(_NOT_EXECUTABLE)
