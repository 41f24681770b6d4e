"""The process that runs the official harness: it dies when the one that started it dies.

Run as a file with the harness's own arguments, so that the harness may live in another
environment. Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run the harness. Arguments: pid of the parent, then those of ``run_evaluation``."""
    parent = int(sys.argv.pop(1))
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        sys.exit(1)
    del sys.path[0]  # this file's folder, which holds names of its own
    runpy.run_module("swebench.harness.run_evaluation", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
