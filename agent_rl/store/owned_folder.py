"""Folders that belong to a living process. What a killed one left is found by its free lock."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

_LOCK = ".lock"
_MIN_AGE_S = 60.0  # the owner of a younger folder may not have locked it yet


class OwnedFolder:
    """``path``, made if need be and owned until ``close`` or the end of this process."""

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # Several owners share it, which the library filelock cannot do: fcntl here and below.
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def close(self) -> None:
        """Give it up; what is in it stays. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def ownerless(root: Path, pattern: str) -> Iterator[Path]:
    """Yield folders below ``root`` whose owner is gone, each locked while it is yielded."""
    for folder in sorted(root.glob(pattern)):
        try:
            if time.time() - folder.stat().st_mtime < _MIN_AGE_S:
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # gone already, another user's, or not one of ours
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            yield folder
        finally:
            os.close(lock)
