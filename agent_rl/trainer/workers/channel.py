"""Typed messages between driver and worker over a Unix socket, bulk data as shared memory.

A frame is magic, whether a block comes with it, length, and the pickled message (both ends are
processes of one run). A block
travels as the descriptor of an anonymous memory file, so it is written once however many workers
read it, and nothing is left to clean up whichever side dies.
"""

from __future__ import annotations

import array
import os
import pickle
import socket
import struct
import threading
from collections.abc import Iterable
from typing import NamedTuple

from agent_rl.errors import TrainerError
from agent_rl.trainer.workers.messages import Message

_HEADER = struct.Struct("<4s?Q")
_MAGIC = b"RLW1"
_MAX_MESSAGE_BYTES = 1 << 30
_READ_BYTES = 1 << 20


class Received(NamedTuple):
    """A message, and the descriptor of the block that came with it; the receiver closes it."""

    message: Message
    block: int | None


class ChannelClosedError(TrainerError):
    """The other end is gone."""


class Channel:
    """One end of the socket. Sending is safe from any thread, receiving from one."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()
        self._buffer = bytearray()
        self._blocks: list[int] = []

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """This process's end, and the one for the child."""
        own, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(own), child

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message, block: int | None = None) -> None:
        """Send, waiting for room. Raises ``ChannelClosedError`` when nobody listens."""
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        frame = memoryview(_HEADER.pack(_MAGIC, block is not None, len(body)) + body)
        with self._sending:
            try:
                if block is not None:
                    # The descriptor arrives with the first bytes of its own frame.
                    frame = frame[socket.send_fds(self._socket, [frame], [block]) :]
                self._socket.sendall(frame)
            except OSError as error:
                raise ChannelClosedError(f"the other end of a worker's channel: {error}") from error

    def receive(self) -> Received:
        """The next message, waiting for it. Raises ``ChannelClosedError`` at the end."""
        while (received := self._take()) is None:
            self._read()
        return received

    def receive_ready(self) -> list[Received]:
        """Return what can be had after one read; does not wait for a frame to be complete.

        Call it when the socket is readable. Raises ``ChannelClosedError`` at the end.
        """
        self._read()
        messages: list[Received] = []
        while (received := self._take()) is not None:
            messages.append(received)
        return messages

    def close(self) -> None:
        """Idempotent; the other end sees the channel end."""
        self._socket.close()
        for block in self._blocks:
            os.close(block)
        self._blocks.clear()

    def _read(self) -> None:
        try:
            data, ancillary, _, _ = self._socket.recvmsg(_READ_BYTES, socket.CMSG_SPACE(64))
        except OSError as error:
            raise ChannelClosedError(f"the other end of a worker's channel: {error}") from error
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors = array.array("i")
                descriptors.frombytes(content[: len(content) - len(content) % 4])
                self._blocks += descriptors
        if not data:
            raise ChannelClosedError("the other end of a worker's channel was closed")
        self._buffer += data

    def _take(self) -> Received | None:
        if len(self._buffer) < _HEADER.size:
            return None
        magic, has_block, length = _HEADER.unpack_from(self._buffer)
        if magic != _MAGIC or length > _MAX_MESSAGE_BYTES:
            raise TrainerError(
                f"a worker's channel is out of step: got={magic!r} and {length} bytes "
                f"expected={_MAGIC!r} and at most {_MAX_MESSAGE_BYTES}"
            )
        end = _HEADER.size + length
        if len(self._buffer) < end:
            return None
        with memoryview(self._buffer) as view:
            message: Message = pickle.loads(view[_HEADER.size : end])
        del self._buffer[:end]
        return Received(message, self._blocks.pop(0) if has_block else None)


def write_block(name: str, parts: Iterable[bytes | memoryview]) -> int:
    """Descriptor of a new anonymous memory file holding ``parts``; the caller closes it."""
    descriptor = os.memfd_create(name)
    try:
        with open(descriptor, "wb", buffering=0, closefd=False) as file:
            for part in parts:
                view = memoryview(part).cast("B")
                while view:
                    view = view[file.write(view) :]
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
