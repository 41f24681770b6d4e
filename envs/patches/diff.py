"""Unified diffs between two small trees, byte for byte, as ``git apply`` accepts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from envs.patches.quoting import quote_path

_CONTEXT = 3
_BINARY_PROBE_BYTES = 8000  # git's rule: a NUL byte in here makes a file binary
_MAX_FILE_BYTES = 1 << 20
_MAX_COMPARED_LINES = 20_000  # more changed lines than these are replaced as one block
_NO_NEWLINE = b"\\ No newline at end of file\n"

Tree = Mapping[str, bytes]
Opcode = tuple[str, int, int, int, int]  # as difflib has them: tag, old range, new range


@dataclass(frozen=True)
class Diff:
    """A patch and the changed files that it leaves out: path and why."""

    patch: bytes
    skipped: tuple[tuple[str, str], ...] = ()


def diff_trees(base: Tree, current: Tree) -> Diff:
    """Return what turns ``base`` into ``current``.

    Empty when nothing that can be said has changed.
    """
    parts: list[bytes] = []
    skipped: list[tuple[str, str]] = []
    for path in sorted(base.keys() | current.keys()):
        before, after = base.get(path), current.get(path)
        if before == after:
            continue
        reason = _unfit(before) or _unfit(after)
        if reason:
            skipped.append((path, reason))
        else:
            parts.append(_diff_file(path, before, after))
    return Diff(b"".join(parts), tuple(skipped))


def _unfit(data: bytes | None) -> str:
    if data is None:
        return ""
    if b"\0" in data[:_BINARY_PROBE_BYTES]:
        return "binary"
    return "too large" if len(data) > _MAX_FILE_BYTES else ""


def _diff_file(path: str, before: bytes | None, after: bytes | None) -> bytes:
    old, new = quote_path(f"a/{path}"), quote_path(f"b/{path}")
    head = [b"diff --git %s %s\n" % (old, new)]
    if before is None:
        head.append(b"new file mode 100644\n")
    elif after is None:
        head.append(b"deleted file mode 100644\n")
    body = _hunks(split_lines(before or b""), split_lines(after or b""))
    if body:  # an empty file that comes or goes has no hunks, and then no file lines either
        head.append(b"--- %s\n" % (b"/dev/null" if before is None else _tabbed(old)))
        head.append(b"+++ %s\n" % (b"/dev/null" if after is None else _tabbed(new)))
    return b"".join(head + body)


def _tabbed(path: bytes) -> bytes:
    """Put a tab behind a path with a space: the name would otherwise end at the space."""
    return path + b"\t" if b" " in path and not path.startswith(b'"') else path


def split_lines(data: bytes) -> list[bytes]:
    """Split into lines with their newline; only a line feed ends a line."""
    parts = data.split(b"\n")
    lines = [part + b"\n" for part in parts[:-1]]
    return [*lines, parts[-1]] if parts[-1] else lines


def _hunks(old: Sequence[bytes], new: Sequence[bytes]) -> list[bytes]:
    return [_hunk(group, old, new) for group in _grouped(_opcodes(old, new))]


def _grouped(codes: Sequence[Opcode]) -> list[list[Opcode]]:
    """Group changes with up to three equal lines around them; those further apart are separate."""
    groups: list[list[Opcode]] = [[]]
    for number, (tag, i1, i2, j1, j2) in enumerate(codes):
        if tag != "equal":
            groups[-1].append((tag, i1, i2, j1, j2))
            continue
        is_last = number == len(codes) - 1
        before = 0 if number == 0 else min(i2 - i1, _CONTEXT)  # belongs to the change before
        after = 0 if is_last else min(i2 - i1, _CONTEXT)
        if before and after and i2 - i1 <= 2 * _CONTEXT:
            groups[-1].append((tag, i1, i2, j1, j2))
            continue
        if before:
            groups[-1].append((tag, i1, i1 + before, j1, j1 + before))
            groups.append([])
        if after:
            groups[-1].append((tag, i2 - after, i2, j2 - after, j2))
    return [group for group in groups if any(code[0] != "equal" for code in group)]


def _opcodes(old: Sequence[bytes], new: Sequence[bytes]) -> list[Opcode]:
    """Compare by difflib, equal ends set aside first: a small edit of a long file stays cheap."""
    shorter = min(len(old), len(new))
    head = 0
    while head < shorter and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < shorter - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    old_end, new_end = len(old) - tail, len(new) - tail
    codes: list[Opcode] = [("equal", 0, head, 0, head)] if head else []
    if old_end - head + new_end - head > _MAX_COMPARED_LINES:
        codes.append(("replace", head, old_end, head, new_end))
    else:
        # autojunk: without it, files of many equal lines take time cubed in their length
        matcher = SequenceMatcher(None, old[head:old_end], new[head:new_end], autojunk=True)
        for tag, i1, i2, j1, j2 in matcher.get_opcodes():
            codes.append((tag, i1 + head, i2 + head, j1 + head, j2 + head))
    if tail:
        codes.append(("equal", old_end, len(old), new_end, len(new)))
    return codes


def _hunk(group: Sequence[Opcode], old: Sequence[bytes], new: Sequence[bytes]) -> bytes:
    old_range = _range(group[0][1], group[-1][2])
    new_range = _range(group[0][3], group[-1][4])
    out = [b"@@ -%s +%s @@\n" % (old_range, new_range)]
    for tag, i1, i2, j1, j2 in group:
        if tag == "equal":
            out += [_line(b" ", line) for line in old[i1:i2]]
        else:
            out += [_line(b"-", line) for line in old[i1:i2]]
            out += [_line(b"+", line) for line in new[j1:j2]]
    return b"".join(out)


def _range(start: int, stop: int) -> bytes:
    count = stop - start
    if count == 1:
        return b"%d" % (start + 1)
    return b"%d,%d" % (start + (count > 0), count)  # an empty range names the line before it


def _line(mark: bytes, line: bytes) -> bytes:
    return mark + line if line.endswith(b"\n") else mark + line + b"\n" + _NO_NEWLINE
