"""Keeps the first and the last bytes of an output of any length, in bounded memory."""

from __future__ import annotations

from envs.sandbox.guest.relay import BoundedBuffer


class CappedOutput:
    """At most ``cap_bytes`` of what was added; half of it from the start, half from the end."""

    def __init__(self, cap_bytes: int) -> None:
        if cap_bytes < 0:
            raise ValueError(f"output cap is negative: got={cap_bytes} expected>=0")
        self._cap_bytes = cap_bytes
        self._head_bytes = cap_bytes - cap_bytes // 2
        self._buffer = BoundedBuffer(cap_bytes)

    def add(self, data: bytes) -> None:
        if data:
            self._buffer.feed(data)

    @property
    def truncated(self) -> bool:
        return self._buffer.total_bytes > self._cap_bytes

    def value(self) -> bytes:
        """What was kept, with an explicit mark where something is missing."""
        kept = self._buffer.kept()
        if not self.truncated:
            return kept
        dropped = self._buffer.total_bytes - len(kept)
        marker = f"\n[... {dropped} bytes left out ...]\n".encode()
        return kept[: self._head_bytes] + marker + kept[self._head_bytes :]
