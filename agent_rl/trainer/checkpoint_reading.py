"""Reading a checkpoint of a run that goes on, which may remove it for a newer one meanwhile."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent_rl.errors import CheckpointError

_PREFIX = ".reading-"
_LOCK = ".lock"
_MIN_AGE_S = 60.0  # the owner of a younger folder may not have locked it yet


class CheckpointGoneError(CheckpointError):
    """A run that is going on removed the checkpoint, for a newer one."""


@contextmanager
def unmoved(checkpoint: Path) -> Iterator[None]:
    """Within: files of ``checkpoint`` are read, and are those of one and the same checkpoint.

    Raises ``CheckpointGoneError`` when it was removed or replaced meanwhile, whatever became of
    the reading. Checkpoints are renamed as a whole before they are removed, so the folder tells.
    """
    inode = _inode(checkpoint)
    try:
        yield
    except (OSError, CheckpointError):
        _require_same(checkpoint, inode)
        raise
    _require_same(checkpoint, inode)


@contextmanager
def held(checkpoint: Path) -> Iterator[Path]:
    """A folder with the files of ``checkpoint`` that stays until the block ends.

    They are links where the file system has them, so this costs no space and no time. Folders
    inside, which hold the trainer's state, are left out. Raises ``CheckpointGoneError``.
    """
    root, link = _place(checkpoint)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        inner = folder / checkpoint.name
        inner.mkdir()
        with unmoved(checkpoint):
            for file in sorted(path for path in checkpoint.iterdir() if path.is_file()):
                _put(file, inner / file.name, link)
        yield inner
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _place(checkpoint: Path) -> tuple[Path, bool]:
    """Where to hold files, and whether links may be tried: beside the checkpoints, or in the
    temporary folder when the run's folder is somebody else's."""
    root = checkpoint.parent.parent
    if not os.access(root, os.W_OK):
        return Path(tempfile.gettempdir()), False
    _remove_ownerless(root)
    return root, True


def _remove_ownerless(root: Path) -> None:
    """What readers that were killed left behind: their locks are free."""
    for folder in root.glob(f"{_PREFIX}*"):
        try:
            if time.time() - folder.stat().st_mtime < _MIN_AGE_S:
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # gone already, or another user's
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def _put(file: Path, target: Path, link: bool) -> None:
    if link:
        try:
            os.link(file, target)
        except FileNotFoundError:
            raise
        except OSError:  # a file system without links
            link = False
    if not link:
        shutil.copyfile(file, target)


def _require_same(checkpoint: Path, inode: int | None) -> None:
    if inode is None or _inode(checkpoint) != inode:
        raise CheckpointGoneError(f"{checkpoint} was removed while it was read")


def _inode(folder: Path) -> int | None:
    try:
        return folder.stat().st_ino
    except FileNotFoundError:
        return None
