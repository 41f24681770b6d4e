"""Runs a server and outlives nothing: ends the server's whole process group with its owner.

Started as ``python -I -S server_guard.py COMMAND...`` with a pipe on standard input. The owner
holds the other end; when the owner stops, however it stops, the pipe closes and the group is
killed. Standard library only, so that it starts in milliseconds.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

_GRACE_S = 10.0


def main(command: list[str]) -> int:
    """Run ``command`` until it ends or standard input closes; returns its exit status."""
    # The server gets the guard's process group, which the owner made with start_new_session.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: _end_group(child))
    while child.poll() is None:
        readable, _, _ = select.select([sys.stdin], [], [], 0.5)
        if readable and not os.read(0, 1):
            _end_group(child)
    # Workers of a server that died must not keep its port or its memory.
    _kill_others()
    return child.returncode


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """TERM, time to finish, then KILL for the whole group, this process included."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(0, signal.SIGKILL)


def _kill_others() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
