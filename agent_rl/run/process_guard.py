"""Child processes that end with this one, however it ends, and with all that they started.

    guard = ProcessGuard(grace_s=10.0)
    subprocess.Popen(command, process_group=guard.group)

The guard is a process that leads a group and reads a pipe whose other end is held here. Children
join the group before they run, so that there is no moment in which one is on its own. When the
pipe closes, because this process stopped in whatever way, the guard ends the group: also who is
stopped (SIGSTOP, a debugger) and so could not notice anything by himself. Ctrl-C in a terminal does
not reach the group.

The guard runs this file as ``python -I -S FILE GRACE_S``: standard library only, so that it starts
in milliseconds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time


class ProcessGuard:
    """The process group of some children.

    Args:
        grace_s: between SIGTERM and SIGKILL when this process is gone; 0 kills at once.
    """

    def __init__(self, grace_s: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(grace_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            process_group=0,
        )

    @property
    def group(self) -> int:
        """Id of the process group, and of the guard itself."""
        return self._process.pid

    def kill(self) -> None:
        """Kill everything in the group, the guard included. Idempotent."""
        if self._process.returncode is None:  # not waited for, so that its id is not reused
            os.killpg(self.group, signal.SIGKILL)
            self._process.communicate()


def main(grace_s: float) -> None:
    """Wait for the pipe to close, then end the whole group, this process included."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.read(0, 1)
    if grace_s:
        os.killpg(0, signal.SIGTERM)
        time.sleep(grace_s)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(float(sys.argv[1]))
