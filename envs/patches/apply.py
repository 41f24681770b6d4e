"""A strict patch reader: what it accepts, ``git apply`` accepts with the same result.

No fuzz, no reversal, no renames, copies, mode changes or binary hunks: a patch that asks for one
of those is refused. Hunks may have moved: like git, the nearest place where every context and
removed line matches is taken. Where git would glue two lines together, it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from envs.errors import PatchError, WorkspaceError
from envs.patches.diff import split_lines
from envs.patches.quoting import unescape_path
from envs.paths import clean_path

_HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_REFUSED = (
    b"rename ",
    b"copy ",
    b"similarity ",
    b"dissimilarity ",
    b"old mode ",
    b"new mode ",
    b"GIT binary patch",
    b"Binary files ",
)


@dataclass(frozen=True)
class Hunk:
    """Lines before and after, context included; ``start``, in the result, counts from 1."""

    start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]
    at_start: bool  # it names line 1 of the old file
    at_end: bool  # no context follows its last change


@dataclass(frozen=True)
class FilePatch:
    """The change of one file. ``creates`` and ``deletes`` are never both set."""

    path: str
    hunks: tuple[Hunk, ...]
    creates: bool = False
    deletes: bool = False


def apply_patch(tree: Mapping[str, bytes], patch: bytes) -> dict[str, bytes]:
    """Return the tree after the patch. Raises PatchError unless all of it applies."""
    result = dict(tree)
    for change in parse_patch(patch):
        _apply_file(result, change)
    return result


def touched_paths(patch: bytes) -> tuple[str, ...]:
    """Return the paths that the patch creates, changes or deletes. Raises PatchError."""
    return tuple(change.path for change in parse_patch(patch))


def parse_patch(patch: bytes) -> list[FilePatch]:
    """Read every file's change, in order. Raises PatchError when any line is out of place."""
    reader = _Reader(split_lines(patch))
    changes: list[FilePatch] = []
    while not reader.at_end:
        changes.append(_parse_file(reader))
    if not changes:
        raise PatchError("the patch is empty: got=0 bytes expected=at least one changed file")
    paths = [change.path for change in changes]
    if len(set(paths)) != len(paths):
        raise PatchError(f"the patch changes a file twice: got={paths} expected=each path once")
    return changes


class _Reader:
    """A cursor over the patch's lines; errors name the line."""

    def __init__(self, lines: Sequence[bytes]) -> None:
        self._lines, self._next = lines, 0

    @property
    def at_end(self) -> bool:
        return self._next >= len(self._lines)

    def peek(self) -> bytes:
        return b"" if self.at_end else self._lines[self._next]

    def take(self) -> bytes:
        line = self.peek()
        self._next += 1
        return line

    def error(self, expected: str) -> PatchError:
        shown = self.peek()[:80] if not self.at_end else b"the end"
        return PatchError(
            f"patch line {self._next + 1} is out of place: got={shown!r} expected={expected}"
        )


def _parse_file(reader: _Reader) -> FilePatch:
    if not reader.peek().startswith(b"diff --git "):
        raise reader.error("'diff --git a/PATH b/PATH'")
    path = _header_path(reader)
    reader.take()
    creates = deletes = False
    while not reader.at_end and not reader.peek().startswith((b"--- ", b"diff --git ")):
        line = reader.peek()
        if line.startswith(_REFUSED) or not line.startswith((b"index ", b"new file", b"deleted f")):
            raise reader.error("a plain text change of one file")
        creates |= line == b"new file mode 100644\n"
        deletes |= line == b"deleted file mode 100644\n"
        if line.startswith((b"new file", b"deleted f")) and not (creates or deletes):
            raise reader.error("mode 100644")
        reader.take()
    if creates and deletes:
        raise PatchError(f"{path!r} is created and deleted at once")
    hunks = _parse_hunks(reader, path, creates, deletes)
    if not hunks and not creates and not deletes:
        raise reader.error(f"a hunk for {path!r}")
    return FilePatch(path, hunks, creates, deletes)


def _header_path(reader: _Reader) -> str:
    """Return the path that both sides of ``diff --git`` name."""
    rest = reader.peek()[len(b"diff --git ") :]
    if not rest.endswith(b"\n"):
        raise reader.error("a newline after the header")
    rest = rest[:-1]
    half = len(rest) // 2
    old, new = rest[:half], rest[half + 1 :]
    if len(rest) % 2 == 0 or rest[half : half + 1] != b" ":
        raise reader.error("the same path behind a/ and b/")
    first, second = _unquote(old, reader), _unquote(new, reader)
    if first[:2] != "a/" or second[:2] != "b/" or first[2:] != second[2:]:
        raise reader.error("the same path behind a/ and b/")
    path = first[2:]
    try:
        usable = clean_path(path) == path
    except WorkspaceError:
        usable = False
    if not usable:
        raise PatchError(f"patch names an unusable path: got={path!r} expected=a relative file")
    return path


def _unquote(name: bytes, reader: _Reader) -> str:
    if not name.startswith(b'"'):
        return name.decode("utf-8", "surrogateescape")
    if len(name) < 2 or not name.endswith(b'"'):
        raise reader.error("a closing quote")

    try:
        inner = unescape_path(name[1:-1])
    except PatchError as error:
        raise reader.error("a known escape") from error
    return inner.decode("utf-8", "surrogateescape")


def _parse_hunks(reader: _Reader, path: str, creates: bool, deletes: bool) -> tuple[Hunk, ...]:
    if not reader.peek().startswith(b"--- "):
        return ()
    for mark, side, absent in ((b"--- ", "a", creates), (b"+++ ", "b", deletes)):
        name = reader.peek().removeprefix(mark)
        expected = "/dev/null" if absent else f"{side}/{path}"
        if not reader.peek().startswith(mark) or not name.endswith(b"\n"):
            raise reader.error(f"{mark.decode()}{expected}")
        plain = name[:-1].split(b"\t")[0]
        if _unquote(plain, reader) != expected:
            raise reader.error(f"{mark.decode()}{expected}")
        reader.take()
    hunks: list[Hunk] = []
    while reader.peek().startswith(b"@@ "):
        hunks.append(_parse_hunk(reader))
    if not hunks:
        raise reader.error("a hunk")
    if not reader.at_end and not reader.peek().startswith(b"diff --git "):
        raise reader.error("the next file or the end")
    return tuple(hunks)


def _parse_hunk(reader: _Reader) -> Hunk:
    match = _HUNK.match(reader.peek())
    if match is None or not reader.peek().endswith(b"\n"):
        raise reader.error("@@ -A,B +C,D @@")
    reader.take()
    old_left, new_left = int(match[2] or 1), int(match[4] or 1)
    old: list[bytes] = []
    new: list[bytes] = []
    trailing, changed = 0, False
    while old_left or new_left:
        line = reader.peek()
        mark, text = line[:1], line[1:]
        if not line.endswith(b"\n") or mark not in (b" ", b"-", b"+"):
            raise reader.error(f"{old_left} more old and {new_left} more new lines")
        reader.take()
        if reader.peek().startswith(b"\\ No newline at end of file"):
            reader.take()
            text = text[:-1]
        if mark != b"+":
            old.append(text)
            old_left -= 1
        if mark != b"-":
            new.append(text)
            new_left -= 1
        trailing = trailing + 1 if mark == b" " else 0
        changed |= mark != b" "
        if old_left < 0 or new_left < 0:
            raise reader.error("as many lines as the hunk's header says")
    if not changed:
        raise reader.error("a hunk that changes something")
    at_start = int(match[1]) <= 1
    return Hunk(int(match[3]), tuple(old), tuple(new), at_start, at_end=trailing == 0)


def _apply_file(tree: dict[str, bytes], change: FilePatch) -> None:
    """Apply one file's change; mutates ``tree``."""
    path, exists = change.path, change.path in tree
    if exists == change.creates:
        state = "there already" if exists else "absent"
        raise PatchError(f"patch does not apply: {path!r} is {state} in the base tree")
    clash = any(other.startswith(f"{path}/") or path.startswith(f"{other}/") for other in tree)
    if change.creates and clash:
        raise PatchError(f"patch does not apply: {path!r} is a folder, or lies below a file")
    lines = _apply_hunks(path, split_lines(tree.get(path, b"")), change.hunks)
    if any(not line.endswith(b"\n") for line in lines[:-1]):
        raise PatchError(f"patch does not apply: {path!r} would lack a newline inside")
    if not change.deletes:
        tree[path] = b"".join(lines)
    elif lines:
        raise PatchError(f"patch does not apply: deleting {path!r} leaves lines behind")
    else:
        del tree[path]


def _apply_hunks(path: str, lines: list[bytes], hunks: Sequence[Hunk]) -> list[bytes]:
    fresh = [True] * len(lines)  # a line that a hunk has matched or made matches no other
    for number, hunk in enumerate(hunks, start=1):
        at = _find(lines, fresh, hunk)
        if at is None:
            raise PatchError(
                f"patch does not apply: hunk {number} of {path!r} matches nowhere near line"
                f" {hunk.start}"
            )
        stop = at + len(hunk.old)
        lines[at:stop] = hunk.new
        fresh[at:stop] = [False] * len(hunk.new)
    return lines


def _find(lines: Sequence[bytes], fresh: Sequence[bool], hunk: Hunk) -> int | None:
    """Search as git does: the place named, then one line after, one before, two after, …

    A hunk that starts at line 1 applies at the beginning only, one without context at its end
    at the end only.
    """
    size, last = len(hunk.old), len(lines) - len(hunk.old)
    if last < 0:
        return None
    first = 0
    if hunk.at_start:
        last = min(last, 0) if not hunk.at_end or last == 0 else -1
    elif hunk.at_end:
        first = last
    start = min(max(hunk.start - 1, 0), len(lines))
    for distance in range(len(lines) + 1):
        for at in (start + distance, start - distance):
            fits = first <= at <= last and all(fresh[at : at + size])
            if fits and tuple(lines[at : at + size]) == hunk.old:
                return at
    return None
