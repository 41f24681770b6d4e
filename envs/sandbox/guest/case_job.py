"""Calls without their expected values: the code under test answers, the host judges.

One JSON line per call: ``[index, "v", encoded value]`` or ``[index, "x", exception name]``; an
import that fails is index -1. The lines are data from an untrusted process and are read as such.
"""

from __future__ import annotations

import json
import os
import sys

from .job import Job, write_files
from .literals import encode


def run(job: Job) -> None:
    """Turn this process into the code under test; it ends with the last answer."""
    write_files(job.header["paths"], job.blobs)
    calls: list[str] = job.header["calls"]
    imports: list[str] = job.header["imports"]
    fd = job.channels.output
    os.close(job.channels.status)
    os.close(job.channels.report)
    # As pytest has it: the folder it was started in, then the standard library.
    sys.path[:] = [os.getcwd(), *sys.path[1:]]
    sys.dont_write_bytecode = True
    del job
    namespace: dict[str, object] = {"__name__": "tests"}
    try:
        for statement in imports:
            exec(statement, namespace)
    except BaseException as error:  # whatever the code under test does is an answer
        _answer(fd, -1, "x", type(error).__name__)
        os._exit(0)
    for index, call in enumerate(calls):
        try:
            kind, payload = "v", encode(eval(call, namespace))
        except BaseException as error:
            kind, payload = "x", type(error).__name__
        _answer(fd, index, kind, payload)
    os.close(fd)  # the answers are complete: the server need not see this process end
    os._exit(0)  # threads and exit handlers of the code under test do not get to run


def _answer(fd: int, index: int, kind: str, payload: object) -> None:
    line = json.dumps([index, kind, payload]).encode() + b"\n"
    while line:
        line = line[os.write(fd, line) :]
