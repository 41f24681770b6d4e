"""Ending a process together with the one that started it, by the kernel.

It also ends a process that is stopped (SIGSTOP, a debugger, a frozen terminal) and so cannot
notice anything by itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


def watched_parent() -> int:
    """Whom a child that is started here may die with: this process's id, or 0 for nobody.

    The kernel's signal comes when the *thread* that started the child ends. The main thread lives
    as long as the process; of another one nobody knows.
    """
    is_main = threading.current_thread() is threading.main_thread()
    return os.getpid() if is_main and sys.platform == "linux" else 0


def die_with(parent: int) -> bool:
    """Be killed when ``parent`` (of ``watched_parent``; 0 does nothing) ends in whatever way.

    False: it is gone already.
    """
    if not parent:
        return True
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent
