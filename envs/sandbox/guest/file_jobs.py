"""Reading and writing below the work folder, link by link refused.

Each component is opened relative to the one before with ``O_NOFOLLOW``, so no link an agent
planted leads anywhere, whatever is renamed meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
from collections.abc import Generator, Iterator

from .job import Job, report_failure
from .protocol import write_all

ENTRY = struct.Struct("<IQ")  # length of the path, length of the content
_LEFT_OUT = (b".git", b"__pycache__")
_MAX_PATH_BYTES = 1024
_FULL = (errno.ENOSPC, errno.EDQUOT)
_PATH_ERRORS = (
    errno.EPERM,
    errno.EROFS,
    errno.ETXTBSY,
    errno.ENOENT,
    errno.ELOOP,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EACCES,
    errno.ENAMETOOLONG,
    errno.EFBIG,
    errno.ENOTEMPTY,
    errno.EINVAL,
)


def read(job: Job) -> None:
    """Write the content of a file to the output pipe."""
    with _path_errors(job), _opened_parent(job.header["path"], create=False) as (parent, name):
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a plain file")
        _copy(fd, job.channels.output)


def write(job: Job) -> None:
    """Write a file aside and rename it: a full disk never leaves half a file under the name."""
    with _path_errors(job), _opened_parent(job.header["path"], create=True) as (parent, name):
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                raise OSError(errno.EINVAL, "not a plain file")
        aside = f".{os.getpid()}.{name[:100]}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        fd = os.open(aside, flags, 0o644, dir_fd=parent)
        try:
            write_all(fd, job.blobs[0])
            os.replace(aside, name, src_dir_fd=parent, dst_dir_fd=parent)
        except OSError:
            os.unlink(aside, dir_fd=parent)
            raise


def delete(job: Job) -> None:
    """Remove a file or a link, never a folder."""
    with _path_errors(job), _opened_parent(job.header["path"], create=False) as (parent, name):
        os.unlink(name, dir_fd=parent)


def snapshot(job: Job) -> None:
    """Write ``ENTRY``, path and content of every plain file, in sorted order, to the output pipe.

    Whatever the agent has made of its folder, this succeeds: files that cannot be read or named
    and those with holes (which could claim any size) are left out.
    """
    for path in sorted(_plain_files()):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except PermissionError:
            continue
        found = os.fstat(fd)
        if found.st_blocks * 512 >= found.st_size:
            write_all(job.channels.output, ENTRY.pack(len(path), found.st_size) + path)
            if _copy(fd, job.channels.output) != found.st_size:
                raise OSError(errno.EIO, f"file changed while it was read: {path!r}")
        os.close(fd)


def _plain_files() -> Iterator[bytes]:
    """Yield paths relative to the current folder, at most ``_MAX_PATH_BYTES`` long."""
    folders = [b""]
    while folders:
        folder = folders.pop()
        try:
            entries = list(os.scandir(folder or b"."))
        except PermissionError:
            continue
        for entry in entries:
            path = folder + entry.name
            if len(path) > _MAX_PATH_BYTES:
                continue
            if entry.is_file(follow_symlinks=False):
                yield path
            elif entry.is_dir(follow_symlinks=False) and entry.name not in _LEFT_OUT:
                folders.append(path + b"/")


def _copy(source: int, target: int) -> int:
    copied = 0
    while data := os.read(source, 1 << 20):
        write_all(target, data)
        copied += len(data)
    return copied


@contextlib.contextmanager
def _opened_parent(path: str, *, create: bool) -> Generator[tuple[int, str]]:
    """Open the folder that holds ``path`` (relative, host-checked); yields it and the last name."""
    *folders, name = path.split("/")
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    current = os.open(".", flags)
    try:
        for folder in folders:
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, dir_fd=current)
            inner = os.open(folder, flags, dir_fd=current)
            os.close(current)
            current = inner
        yield current, name
    finally:
        os.close(current)


@contextlib.contextmanager
def _path_errors(job: Job) -> Generator[None]:
    """Report a path that cannot be used as the agent's trouble, anything else as the machine's."""
    try:
        yield
    except OSError as error:
        kind = "path" if error.errno in _PATH_ERRORS else "setup"
        kind = "full" if error.errno in _FULL else kind
        report_failure(job.channels.status, kind, error)
