"""Relative paths of a work folder, and which of them are protected."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from fnmatch import fnmatchcase

from envs.errors import WorkspaceError

_MAX_PATH_BYTES = 1024


def clean_path(path: str) -> str:
    """Return ``path`` relative and normal. Raises WorkspaceError when it leads outside.

    Whatever happens to lie there: links are dealt with where the file is opened.
    """
    normal = posixpath.normpath(path)
    bad = (
        not path
        or "\0" in path
        or normal in (".", "..")
        or normal.startswith(("/", "../"))
        or not 0 < _num_bytes(normal) <= _MAX_PATH_BYTES
        or ".git" in normal.split("/")
    )
    if bad:
        raise WorkspaceError(
            f"path is not usable: got={path[:200]!a}"
            " expected a file below the work folder, relative to it, outside .git"
        )
    return normal


def _num_bytes(path: str) -> int:
    """Return the length on disk; 0 for half a surrogate pair, which no file name can hold."""
    try:
        return len(path.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        return 0


def is_protected(path: str, globs: Sequence[str]) -> bool:
    """Tell whether ``path`` is one that a source patch may not touch. ``*`` also spans ``/``."""
    return any(fnmatchcase(path, glob) for glob in globs)
