"""Jobs as the host words them, and replies as it reads them."""

from __future__ import annotations

import errno
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from envs.base import ExecResult
from envs.errors import InfrastructureError, SandboxFullError, WorkspaceError
from envs.sandbox.capture import marked
from envs.sandbox.guest.file_jobs import ENTRY
from envs.sandbox.guest.protocol import Reply, Request, pack_body

FILE_JOB_WALL_S = 60.0
SNAPSHOT_CAP_BYTES = 256 << 20


def exec_job(
    argv: Sequence[str],
    *,
    timeout_s: float,
    output_cap_bytes: int,
    cwd: str = ".",
    env: Mapping[str, str] | None = None,
    stdin: bytes = b"",
    files: Mapping[str, bytes] | None = None,
    fresh: bool = False,
    wants_report: bool = False,
) -> tuple[Request, bytes]:
    """Word a command, in a work folder of its own filled with ``files`` when ``fresh``."""
    files = files or {}
    header = {
        "op": "exec",
        "argv": list(argv),
        "cwd": cwd,
        "env": dict(env or {}),
        "paths": list(files),
        "wants_report": wants_report,
    }
    body = pack_body(header, [stdin, *files.values()])
    return Request(timeout_s, 0.0, output_cap_bytes, fresh, len(body)), body


def case_job(
    files: Mapping[str, bytes],
    imports: Sequence[str],
    calls: Sequence[str],
    *,
    timeout_s: float,
    cpu_s: float,
    output_cap_bytes: int,
) -> tuple[Request, bytes]:
    """Word calls to make in a fresh work folder filled with ``files``."""
    header = {"op": "cases", "paths": list(files), "imports": list(imports), "calls": list(calls)}
    body = pack_body(header, list(files.values()))
    request = Request(timeout_s, cpu_s, output_cap_bytes, True, len(body), until_output_ends=True)
    return request, body


def file_job(op: str, path: str, data: bytes = b"", cap_bytes: int = 0) -> tuple[Request, bytes]:
    """Word ``read``, ``write``, ``delete`` or ``snapshot`` in the sandbox's lasting work folder."""
    body = pack_body({"op": op, "path": path}, [data])
    return Request(FILE_JOB_WALL_S, 0.0, cap_bytes, False, len(body)), body


def exec_result(reply: Reply, oom_kills: int) -> ExecResult:
    """Return the outcome of a command. Raises InfrastructureError when it could not be set up."""
    status = read_status(reply)
    return ExecResult(
        exit_code=status.get("exit"),
        output=marked(reply.output, reply.total_output_bytes),
        truncated=reply.total_output_bytes > len(reply.output),
        timed_out=reply.timed_out,
        cpu_exceeded=reply.cpu_exceeded,
        oom=oom_kills > 0,
        seconds=reply.seconds,
        report=reply.report,
    )


def file_result(reply: Reply, path: str) -> bytes:
    """Return the output of a file job. Raises WorkspaceError or InfrastructureError."""
    read_status(reply, path)
    if reply.timed_out or reply.exit_code != 0:
        raise InfrastructureError(
            f"a file operation did not end: path={path!r} got exit code {reply.exit_code},"
            f" expected 0 within {FILE_JOB_WALL_S} s"
        )
    if reply.total_output_bytes > len(reply.output):
        raise WorkspaceError(
            f"{path!r} is too large: got={reply.total_output_bytes}"
            f" expected at most {len(reply.output)} bytes"
        )
    return reply.output


def read_status(reply: Reply, path: str = "") -> dict[str, Any]:
    """Read the guest's own word on a job, never the agent's code's. Raises what it reports."""
    if not reply.status:
        return {}
    status: dict[str, Any] = json.loads(reply.status)
    failure = status.get("failure")
    if failure == "path":
        raise WorkspaceError(f"cannot use {path!r} in the work folder: got={status['message']}")
    if failure == "full":
        raise SandboxFullError(f"no room in the sandbox for {path!r}: got={status['message']}")
    if failure is not None:
        name = errno.errorcode.get(status["errno"] or 0, "no errno")
        raise InfrastructureError(
            f"a job could not be set up in the sandbox: got={status['message']} ({name}),"
            " expected none; look at disk, memory and the sandbox's limits"
        )
    return status


def unpack_snapshot(data: bytes) -> dict[str, bytes]:
    """Unpack a snapshot: path (bytes that are not UTF-8 as surrogates) to content."""
    files: dict[str, bytes] = {}
    offset = 0
    try:
        while offset < len(data):
            path_size, size = ENTRY.unpack_from(data, offset)
            offset += ENTRY.size
            path = data[offset : offset + path_size].decode("utf-8", "surrogateescape")
            offset += path_size
            files[path] = data[offset : offset + size]
            offset += size
    except struct.error as error:
        raise InfrastructureError(f"a snapshot is cut short: got={error}") from error
    return files
