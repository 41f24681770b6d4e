"""A file lock that dies with its process: a kill frees it, a file left behind blocks nobody."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock, Timeout


def try_lock(file: Path) -> FileLock | None:
    """Take the lock of ``file``, made if need be; return None while anybody else holds it.

    It is held until ``release``, which is idempotent, or the end of this process. Raises OSError.
    """
    lock = FileLock(file, thread_local=False)  # any thread may release it
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return None
    return lock
