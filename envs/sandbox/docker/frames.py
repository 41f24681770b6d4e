"""The engine's multiplexed stream: eight bytes of header (stream, length), then the payload."""

from __future__ import annotations

import struct

_HEADER = struct.Struct(">BxxxI")


class FrameReader:
    """A reader that takes the stream apart as it comes, in pieces of any size."""

    def __init__(self) -> None:
        self._header = b""
        self._missing = 0  # payload bytes of the current frame still to come
        self._stream = 0

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Return payloads in order, each with its stream (1 output, 2 error).

        A frame may be split.
        """
        parts: list[tuple[int, bytes]] = []
        view = memoryview(data)
        while view:
            if not self._missing:
                take = _HEADER.size - len(self._header)
                self._header += bytes(view[:take])
                view = view[take:]
                if len(self._header) < _HEADER.size:
                    break
                self._stream, self._missing = _HEADER.unpack(self._header)
                self._header = b""
                continue
            part = view[: self._missing]
            parts.append((self._stream, bytes(part)))
            self._missing -= len(part)
            view = view[len(part) :]
        return parts
