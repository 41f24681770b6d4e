"""The first and the last bytes of an output of any length, kept in bounded memory."""

from __future__ import annotations

from envs.sandbox.guest.relay import BoundedBuffer


class CappedOutput:
    """At most ``cap_bytes`` of what was added; half of it from the start, half from the end."""

    def __init__(self, cap_bytes: int) -> None:
        if cap_bytes < 0:
            raise ValueError(f"output cap is negative: got={cap_bytes} expected>=0")
        self._cap_bytes = cap_bytes
        self._buffer = BoundedBuffer(cap_bytes)

    def add(self, data: bytes) -> None:
        if data:
            self._buffer.feed(data)

    @property
    def truncated(self) -> bool:
        return self._buffer.total_bytes > self._cap_bytes

    def value(self) -> bytes:
        """Return what was kept, with an explicit mark where something is missing."""
        return marked(self._buffer.kept(), self._buffer.total_bytes)


def marked(kept: bytes, total_bytes: int) -> bytes:
    """Put an explicit mark in the middle of what was kept where something of it is missing."""
    dropped = total_bytes - len(kept)
    if not dropped:
        return kept
    head = len(kept) - len(kept) // 2
    return b"%s\n[... %d bytes left out ...]\n%s" % (kept[:head], dropped, kept[head:])
