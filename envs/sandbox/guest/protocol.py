"""Frames on the control pipe between the host and the server inside the sandbox.

A request is a fixed prefix, which the server reads, and a body, which only the forked child
reads: what one job is about never passes through the memory of the process that later jobs are
forked from. A reply is a fixed prefix and three runs of bytes: output, status, report.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_REQUEST = struct.Struct("<4sddQBBQ")
_REPLY = struct.Struct("<4siBdQQQQ")
_HEADER_LENGTH = struct.Struct("<I")
_REQUEST_MAGIC = b"JOB1"
_REPLY_MAGIC = b"RES1"

REQUEST_BYTES = _REQUEST.size
REPLY_BYTES = _REPLY.size
KILL = _REQUEST.pack(b"KILL", 0, 0, 0, 0, 0, 0)  # in place of a request: end the job in progress
READY = b"R"  # the child has read its whole body; the control pipe is in step again

_FLAG_TIMED_OUT = 1
_FLAG_CPU_EXCEEDED = 2

Read = Callable[[int], bytes]  # exactly n bytes, or EOFError


class ProtocolError(Exception):
    """A control pipe whose two ends are out of step."""


@dataclass(frozen=True)
class Request:
    """The part of a job that the server itself needs."""

    wall_s: float
    cpu_s: float  # 0 is no budget of its own
    output_cap_bytes: int
    fresh: bool  # a work folder of its own, gone afterwards
    body_bytes: int
    until_output_ends: bool = (
        False  # once the output is closed the job is over, whatever still runs
    )

    def pack(self) -> bytes:
        return _REQUEST.pack(
            _REQUEST_MAGIC,
            self.wall_s,
            self.cpu_s,
            self.output_cap_bytes,
            self.fresh,
            self.until_output_ends,
            self.body_bytes,
        )

    @classmethod
    def unpack(cls, data: bytes) -> Request:
        magic, wall_s, cpu_s, cap, fresh, until_output_ends, body = _REQUEST.unpack(data)
        if magic != _REQUEST_MAGIC:
            raise ProtocolError(
                f"request prefix is damaged: got={magic!r} expected={_REQUEST_MAGIC!r}"
            )
        return cls(wall_s, cpu_s, cap, bool(fresh), body, bool(until_output_ends))


@dataclass(frozen=True)
class Reply:
    """The end of a job.

    ``exit_code`` is that of the job's first process, -N for signal N, and 0 where the end of the
    output ended the job.
    """

    exit_code: int
    timed_out: bool
    cpu_exceeded: bool
    seconds: float
    total_output_bytes: int  # written by the job, of which ``output`` keeps at most the cap
    output: bytes
    status: bytes
    report: bytes

    def pack(self) -> bytes:
        flags = _FLAG_TIMED_OUT * self.timed_out | _FLAG_CPU_EXCEEDED * self.cpu_exceeded
        prefix = _REPLY.pack(
            _REPLY_MAGIC,
            self.exit_code,
            flags,
            self.seconds,
            self.total_output_bytes,
            len(self.output),
            len(self.status),
            len(self.report),
        )
        return b"".join((prefix, self.output, self.status, self.report))

    @classmethod
    def read(cls, read: Read) -> Reply:
        magic, code, flags, seconds, total, output, status, report = _REPLY.unpack(
            read(REPLY_BYTES)
        )
        if magic != _REPLY_MAGIC:
            raise ProtocolError(f"reply prefix is damaged: got={magic!r} expected={_REPLY_MAGIC!r}")
        return cls(
            exit_code=code,
            timed_out=bool(flags & _FLAG_TIMED_OUT),
            cpu_exceeded=bool(flags & _FLAG_CPU_EXCEEDED),
            seconds=seconds,
            total_output_bytes=total,
            output=read(output),
            status=read(status),
            report=read(report),
        )


def pack_body(header: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> bytes:
    """Pack a JSON header followed by the blobs; their sizes are put into the header."""
    text = json.dumps({**header, "blobs": [len(blob) for blob in blobs]}).encode()
    return b"".join((_HEADER_LENGTH.pack(len(text)), text, *blobs))


def unpack_body(data: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """Invert :func:`pack_body`."""
    (length,) = _HEADER_LENGTH.unpack_from(data)
    offset = _HEADER_LENGTH.size + length
    header: dict[str, Any] = json.loads(data[_HEADER_LENGTH.size : offset])
    blobs: list[bytes] = []
    for size in header.pop("blobs"):
        blobs.append(data[offset : offset + size])
        offset += size
    if offset != len(data):
        raise ProtocolError(f"job body has the wrong length: got={len(data)} expected={offset}")
    return header, blobs


def read_exactly(fd: int, size: int) -> bytes:
    """Read ``size`` bytes from a blocking descriptor. Raises EOFError when it ends before."""
    parts: list[bytes] = []
    missing = size
    while missing:
        part = os.read(fd, min(missing, 1 << 20))
        if not part:
            raise EOFError(f"control pipe closed: got={size - missing} expected={size} bytes")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
