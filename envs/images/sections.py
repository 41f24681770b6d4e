"""A git patch taken apart by file, so that parts of it can be refused."""

from __future__ import annotations

import re
from dataclasses import dataclass

from envs.errors import PatchError
from envs.patches.quoting import unescape_path

_HEADER = b"diff --git "
_QUOTED = re.compile(rb'"((?:[^"\\]|\\.)*)"')
_REFUSED = (b"rename ", b"copy ", b"GIT binary patch", b"Binary files ")


@dataclass(frozen=True)
class Section:
    """The change of one file."""

    path: str
    data: bytes
    creates: bool
    is_link: bool
    added: tuple[bytes, ...]  # added lines, without their mark


def split_patch(patch: bytes) -> list[Section]:
    """Split a patch into every file's part, in order; together they are the patch.

    Raises PatchError.

    Inside a hunk every line starts with a blank, a sign or a backslash, so a header is never
    content. Renames, copies and binary hunks are refused: our own patches have none.
    """
    if not patch.startswith(_HEADER):
        raise PatchError(
            f"not a git patch: got={patch[:40]!r} expected=a line 'diff --git a/… b/…'"
        )
    starts = [match.start() for match in re.finditer(rb"^diff --git ", patch, re.MULTILINE)]
    ends = [*starts[1:], len(patch)]
    return [_read_section(patch[start:end]) for start, end in zip(starts, ends, strict=True)]


def _read_section(data: bytes) -> Section:
    lines = data.split(b"\n")
    head: list[bytes] = []
    for line in lines:
        if line.startswith(b"@@"):
            break
        head.append(line)
    for line in head:
        if line.startswith(_REFUSED):
            raise PatchError(f"the patch asks for more than text changes: got={line[:80]!r}")
    names = {name for name in map(_file_name, head) if name}
    from_header = _header_names(head[0])
    if len(names | from_header) != 1:
        raise PatchError(f"the file of a patch section is unclear: got={head[0][:200]!r}")
    path = (names | from_header).pop()
    body = lines[len(head) :]
    return Section(
        path=path.decode("utf-8", "surrogateescape"),
        data=data,
        creates=any(line.startswith(b"new file mode") for line in head),
        is_link=any(line.endswith(b" 120000") or b"mode 120000" in line for line in head[1:]),
        added=tuple(line[1:] for line in body if line.startswith(b"+")),
    )


def _file_name(line: bytes) -> bytes:
    """Return the path in a ``---`` or ``+++`` line, empty for other lines and for /dev/null."""
    if not line.startswith((b"--- ", b"+++ ")):
        return b""
    name = _unquote(line[4:].rstrip(b"\t"))
    return b"" if name == b"/dev/null" else _without_prefix(name)


def _header_names(line: bytes) -> set[bytes]:
    """Return the paths of the ``diff --git`` line.

    It is ambiguous only for renames, which are refused.
    """
    rest = line[len(_HEADER) :]
    quoted = _QUOTED.findall(rest)
    if quoted:
        return {_without_prefix(unescape_path(name)) for name in quoted}
    half = len(rest) // 2
    first, second = rest[:half], rest[half + 1 :]
    return {_without_prefix(first), _without_prefix(second)}


def _without_prefix(name: bytes) -> bytes:
    if name[:2] not in (b"a/", b"b/"):
        raise PatchError(f"a path has no prefix: got={name[:200]!r} expected=a/… or b/…")
    path = name[2:]
    parts = path.split(b"/")
    if not path or b".." in parts or path.startswith(b"/") or b"\0" in path:
        raise PatchError(f"a path leads outside: got={name[:200]!r}")
    return path


def _unquote(name: bytes) -> bytes:
    match = _QUOTED.fullmatch(name)
    return unescape_path(match.group(1)) if match else name
