"""The channel that runs scripts one after another through the shell behind one exec socket."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from envs.sandbox.capture import CappedOutput
from envs.sandbox.docker.docker_errors import ContainerGoneError
from envs.sandbox.docker.engine import ExecStream

_STATUS_CAP_BYTES = 64
_TICK_S = 0.5


@dataclass(frozen=True)
class Ending:
    """The way a script ended. Only an ``ended`` one has an exit code and left the shell usable."""

    how: Literal["ended", "deadline", "closed"]
    exit_code: int | None = None
    oom_kills: int = 0  # of the container so far
    left_behind: bool = False  # processes that the shell could not kill


class ShellChannel:
    """The host's end of the shell in ``guest_shell``. One script at a time."""

    def __init__(self, stream: ExecStream) -> None:
        self._stream = stream

    def run(
        self,
        script: str,
        output: CappedOutput,
        *,
        deadline: float,
        stdin: bytes = b"",
        may_go_on: Callable[[], bool] = lambda: True,
    ) -> Ending:
        """Run ``script``, a text without NUL, and add what it writes to ``output``.

        ``deadline`` is on the clock of ``time.monotonic``. ``may_go_on`` is asked twice a second;
        False ends the wait as a deadline does.
        """
        nonce = secrets.token_hex(16)
        body = script.encode("utf-8", "surrogateescape")
        try:
            self._stream.send(f"{nonce} {len(body)} {len(stdin)}\n".encode() + body + stdin)
        except ContainerGoneError:
            return Ending("closed")
        return self._follow(nonce.encode(), output, deadline, may_go_on)

    def _follow(
        self,
        nonce: bytes,
        output: CappedOutput,
        deadline: float,
        may_go_on: Callable[[], bool],
    ) -> Ending:
        pending = b""  # the end of the stream, which may hold the start of the nonce
        next_tick = time.monotonic() + _TICK_S
        while True:
            now = time.monotonic()
            if now >= next_tick:
                if not may_go_on():
                    return self._stop(pending, output, "deadline")
                next_tick = now + _TICK_S
            data = self._stream.receive(min(deadline, next_tick) - now)
            if data == b"":
                return self._stop(pending, output, "closed")
            if data is not None:
                pending += data
                found = pending.find(nonce)
                if found >= 0:
                    output.add(pending[:found])
                    return self._read_status(pending[found + len(nonce) :])
                keep = min(len(pending), len(nonce) - 1)
                output.add(pending[: len(pending) - keep])
                pending = pending[len(pending) - keep :]
            # Checked after reading as well: a command that floods must still meet its deadline.
            if time.monotonic() >= deadline:
                return self._stop(pending, output, "deadline")

    def _read_status(self, status: bytes) -> Ending:
        last = time.monotonic() + 10.0
        while not status.endswith(b"\n") and len(status) < _STATUS_CAP_BYTES:
            data = self._stream.receive(last - time.monotonic())
            if not data:
                return Ending("closed")
            status += data
        fields = status.split()
        if len(fields) != 3 or not all(field.isdigit() for field in fields):
            return Ending("closed")  # out of step: the shell is opened anew
        code, oom_kills, left_behind = map(int, fields)
        return Ending("ended", code, oom_kills, bool(left_behind))

    def _stop(
        self, pending: bytes, output: CappedOutput, how: Literal["deadline", "closed"]
    ) -> Ending:
        output.add(pending)
        return Ending(how)

    def close(self) -> None:
        self._stream.close()
