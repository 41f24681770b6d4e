"""A sandbox's folder on the host, and clearing away what killed hosts left behind.

The folder holds a lock for as long as its owner lives. One whose lock is free belongs to nobody:
it is removed, with the control groups of the same name, when the next sandbox starts.
"""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import tempfile
import time
from pathlib import Path

from envs.sandbox.cgroup import remove_groups

_PREFIX = "sandbox-"
_LOCK = "lock"
_MIN_AGE_S = 60.0  # a younger folder may be one whose owner has not locked it yet


class Scratch:
    """One locked folder; ``name`` is unique on this machine."""

    def __init__(self, root: str | None = None) -> None:
        """Create and lock it; the first one in a process also clears away what is stale."""
        root = root or tempfile.gettempdir()
        _sweep_once(root)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    @property
    def name(self) -> str:
        return self.path.name

    def remove(self) -> None:
        """Delete the folder. Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def sweep(root: str, min_age_s: float = _MIN_AGE_S) -> list[str]:
    """Remove ownerless sandbox folders below ``root`` and their groups; returns their names."""
    removed: list[str] = []
    for folder in Path(root).glob(f"{_PREFIX}*"):
        try:
            if time.time() - folder.stat().st_mtime < min_age_s:
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # another user's, or not one of ours
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if remove_groups(folder.name):
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder.name)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)
    return removed


@functools.cache
def _sweep_once(root: str) -> None:
    sweep(root)
