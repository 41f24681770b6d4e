"""Pure functions for what tools do to the content of a file; both carriers of tools call them.

Content is bytes, so what is not UTF-8 survives an edit. Only a line feed ends a line, and lines
count from 1.
"""

from __future__ import annotations

from typing import Literal

from envs.errors import EnvsError, WorkspaceError
from envs.patches.diff import split_lines


class RefusedEditError(EnvsError):
    """A change or view that makes no sense for this content; the text is for the model."""

    def __init__(self, reason: str, kind: Literal["call", "lines"] = "call") -> None:
        super().__init__(reason)
        self.kind: Literal["call", "lines"] = kind


def to_text(content: bytes) -> str:
    """Decode for reading; stray bytes become surrogates, which ``to_bytes`` turns back."""
    return content.decode("utf-8", "surrogateescape")


def to_bytes(text: str) -> bytes:
    """Invert ``to_text``. Raises WorkspaceError for half a surrogate pair, which is no text."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise WorkspaceError(f"text cannot be written: got={error} expected=Unicode") from error


def check_lines(first: int, last: int, num_lines: int, asked_last: int | None = None) -> None:
    """Raise RefusedEditError unless ``first`` to ``last`` are lines; the message has what was
    asked."""
    if not 1 <= first <= last <= num_lines:
        asked = last if asked_last is None else asked_last
        raise RefusedEditError(
            f"no such lines: got={first}-{asked} expected=1 to {num_lines}", "lines"
        )


def replace_once(content: bytes, old: bytes, new: bytes, rule: str) -> bytes:
    """Replace the one occurrence of ``old``. Raises RefusedEditError, which begins with ``rule``,
    for none or several."""
    count = content.count(old) if old else 0
    if count != 1:
        raise RefusedEditError(f"{rule}: got={count} expected=1")
    return content.replace(old, new)


def replace_lines(content: bytes, first: int, last: int, new: bytes) -> bytes:
    """Put ``new`` in the place of lines ``first`` to ``last``; it ends a line where they did.

    Raises RefusedEditError.
    """
    lines = split_lines(content)
    check_lines(first, last, len(lines))
    if lines[last - 1].endswith(b"\n") and new and not new.endswith(b"\n"):
        new += b"\n"
    lines[first - 1 : last] = [new]
    return b"".join(lines)


def insert_lines(content: bytes, after: object, new: bytes) -> bytes:
    """Put ``new`` behind line ``after``, 0 for the start. Raises RefusedEditError."""
    lines = content.split(b"\n")
    if not isinstance(after, int) or not 0 <= after <= len(lines):
        raise RefusedEditError(f"insert_line got={after} expected=0 to {len(lines)}", "lines")
    return b"\n".join([*lines[:after], new, *lines[after:]])
