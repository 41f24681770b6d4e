"""Reading a checkpoint of a run that goes on, which may remove it for a newer one meanwhile."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent_rl.errors import CheckpointError
from agent_rl.store.owned_folder import OwnedFolder, ownerless

_PREFIX = ".reading-"


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
    inside, which hold the trainer's state, are left out. A checkpoint beside which nothing can be
    written is given as it is. Raises ``CheckpointGoneError``.
    """
    root = checkpoint.parent.parent
    if not os.access(root, os.W_OK):
        yield checkpoint  # somebody else's run: a copy might not fit into the temporary folder
        return
    for folder in ownerless(root, f"{_PREFIX}*"):  # of readers that were killed
        shutil.rmtree(folder, ignore_errors=True)
    owned = OwnedFolder(Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root)))
    try:
        inner = owned.path / checkpoint.name
        inner.mkdir()
        with unmoved(checkpoint):
            for file in sorted(path for path in checkpoint.iterdir() if path.is_file()):
                _put(file, inner / file.name)
        yield inner
    finally:
        shutil.rmtree(owned.path, ignore_errors=True)
        owned.close()


def _put(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without links
        shutil.copyfile(file, target)


def _require_same(checkpoint: Path, inode: int | None) -> None:
    if inode is None or _inode(checkpoint) != inode:
        raise CheckpointGoneError(f"{checkpoint} was removed while it was read")


def _inode(folder: Path) -> int | None:
    try:
        return folder.stat().st_ino
    except FileNotFoundError:
        return None
