"""A job: the request as its operation sees it, and the pipes it may write to."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import kernel
from .protocol import write_all


@dataclass(frozen=True)
class JobConfig:
    """The configuration that all jobs of a sandbox share."""

    namespaces: bool
    workspace: str  # absolute path of the work folder inside the sandbox
    limits: kernel.Limits
    tmp_bytes: int
    tmp_inodes: int
    environment: Mapping[str, str]
    keep_readable: Sequence[str] = ()  # folders below /tmp that jobs need, such as an interpreter


@dataclass(frozen=True)
class Channels:
    """Write ends of the three pipes to the server."""

    output: int  # whatever the job prints; cases: one result line per call
    status: int  # ours: how the job went; closed before code of the agent's can reach it
    report: int  # a test runner's structured report


@dataclass(frozen=True)
class Job:
    """A request as its operation sees it."""

    config: JobConfig
    channels: Channels
    header: dict[str, Any]
    blobs: list[bytes]


def report_failure(status_fd: int, kind: str, error: BaseException) -> None:
    """Tell the host why a job could not be done, as ``{"failure": kind, ...}``."""
    number = error.errno if isinstance(error, OSError) else None
    message = {"failure": kind, "errno": number, "message": f"{type(error).__name__}: {error}"}
    write_all(status_fd, json.dumps(message).encode())


def fresh_folder(workspace: str, pid: int) -> str:
    """Return the work folder of one job where no mount namespace can give it a new one."""
    return f"{workspace}.fresh-{pid}"


def write_files(paths: Sequence[str], blobs: Sequence[bytes]) -> None:
    """Fill the empty current folder. ``paths`` were checked by the host to be relative."""
    for path, data in zip(paths, blobs, strict=True):
        folder = os.path.dirname(path)
        if folder:
            os.makedirs(folder, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
        try:
            write_all(fd, data)
        finally:
            os.close(fd)
