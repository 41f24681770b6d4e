"""A folder below the temporary directory that goes with its process, at the latest with the next.

Ray keeps sockets and logs of a session in one. A process that is killed leaves it behind; the lock
in it, which the kernel takes back, says so to whoever makes the next one.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from agent_rl.store.file_lock import try_lock

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
        self._lock = try_lock(fresh)
        fresh.rename(self.path / _LOCK)  # seen by others only once it is held

    def remove(self) -> None:
        """Remove the folder and give up its lock. Idempotent."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self._lock.release()
            self._lock = None


def _sweep(root: Path, prefix: str) -> None:
    """Remove folders whose owner is gone."""
    for file in root.glob(f"{prefix}*/{_LOCK}"):
        with suppress(OSError):  # removed meanwhile, or of another user
            lock = try_lock(file)
            if lock is not None:
                shutil.rmtree(file.parent, ignore_errors=True)
                lock.release()
