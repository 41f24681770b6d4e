"""A folder below the temporary directory that goes with its process, at the latest with the next.

Ray keeps sockets and logs of a session in one. A process that is killed leaves it behind; the lock
in it, which the kernel takes back, says so to whoever makes the next one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_LOCK = "owner.lock"


class SessionFolder:
    """A new folder of this process; ``prefix`` is what those of one kind have in common.

    It lies below ``root``, by default the temporary directory.
    """

    def __init__(self, prefix: str, root: Path | None = None) -> None:
        root = root or Path(tempfile.gettempdir())
        _sweep(root, prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        fresh = self.path / f"{_LOCK}.new"
        self._lock = os.open(fresh, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        fresh.rename(self.path / _LOCK)  # seen by others only once it is held

    def remove(self) -> None:
        """Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _sweep(root: Path, prefix: str) -> None:
    """Remove folders whose owner is gone."""
    for file in root.glob(f"{prefix}*/{_LOCK}"):
        with suppress(OSError):  # removed meanwhile, or of another user
            lock = os.open(file, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: in use
                shutil.rmtree(file.parent, ignore_errors=True)
            finally:
                os.close(lock)
