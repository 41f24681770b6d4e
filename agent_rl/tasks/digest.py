"""A digest of tasks, to tell whether a resumed run asks the same ones."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, cast

from envs.base import Task


def tasks_digest(tasks: Sequence[Task]) -> str:
    """Return 16 hex digits over order and contents: issues, files, tests, images, metadata.

    What a task of one's own holds beyond plain values counts by its type alone: objects have no
    contents that two processes would write alike.
    """
    digest = hashlib.sha256()
    for task in tasks:
        _update(digest, task)
    return digest.hexdigest()[:16]


def _update(digest: hashlib._Hash, value: object) -> None:
    """Add one value; its type and length keep neighbours apart."""
    digest.update(type(value).__name__.encode())
    if is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            _update(digest, getattr(value, item.name))
    elif isinstance(value, Mapping):
        entries = cast(Mapping[Any, object], value)
        digest.update(b"%d:" % len(entries))
        for key in sorted(entries, key=str):
            _update(digest, key)
            _update(digest, entries[key])
    elif isinstance(value, tuple | list):
        items = cast(Sequence[object], value)
        digest.update(b"%d:" % len(items))
        for item in items:
            _update(digest, item)
    elif isinstance(value, str | bytes | int | float | bool | None):
        text = value if isinstance(value, bytes) else str(value).encode(errors="surrogatepass")
        digest.update(b"%d:" % len(text) + text)
