"""Keeps the first and the last bytes of an output of any length, in bounded memory."""

from __future__ import annotations


class CappedOutput:
    """At most ``cap_bytes`` of what was added; half of it from the start, half from the end."""

    def __init__(self, cap_bytes: int) -> None:
        if cap_bytes < 0:
            raise ValueError(f"output cap is negative: got={cap_bytes} expected>=0")
        self._tail_cap = cap_bytes // 2
        self._head_cap = cap_bytes - self._tail_cap
        self._head = bytearray()
        self._tail = bytearray()
        self.total_bytes = 0

    def add(self, data: bytes) -> None:
        self.total_bytes += len(data)
        room = self._head_cap - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data[-self._tail_cap :] if self._tail_cap else b""
            # Trimming only now and then keeps the cost per byte constant.
            if len(self._tail) > 2 * self._tail_cap + 65536:
                self._trim()

    def _trim(self) -> None:
        del self._tail[: max(0, len(self._tail) - self._tail_cap)]

    @property
    def truncated(self) -> bool:
        return self.total_bytes > self._head_cap + self._tail_cap

    def value(self) -> bytes:
        """What was kept, with an explicit mark where something is missing."""
        self._trim()
        if not self.truncated:
            return bytes(self._head + self._tail)
        dropped = self.total_bytes - len(self._head) - len(self._tail)
        marker = f"\n[... {dropped} bytes left out ...]\n".encode()
        return bytes(self._head) + marker + bytes(self._tail)
