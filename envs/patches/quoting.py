"""Git's C-style quoting of paths in patches."""

from __future__ import annotations

import re

from envs.errors import PatchError

_LETTERS = {7: "a", 8: "b", 9: "t", 10: "n", 11: "v", 12: "f", 13: "r", 34: '"', 92: "\\"}
_VALUES = {letter.encode(): bytes([value]) for value, letter in _LETTERS.items()}
_ESCAPE = re.compile(rb"\\([0-3][0-7]{2}|.)", re.DOTALL)


def quote_path(path: str) -> bytes:
    """Quote a path where it needs it."""
    raw = path.encode("utf-8", "surrogateescape")
    if not any(byte < 32 or byte in (34, 92, 127) for byte in raw):
        return raw
    out = bytearray(b'"')
    for byte in raw:
        if byte in _LETTERS:
            out += b"\\" + _LETTERS[byte].encode()
        elif byte < 32 or byte == 127:
            out += b"\\%03o" % byte
        else:
            out.append(byte)
    return bytes(out + b'"')


def unescape_path(inner: bytes) -> bytes:
    """Undo the escapes between a quoted path's quotes. Raises PatchError for an unknown one."""

    def value(match: re.Match[bytes]) -> bytes:
        code = match[1]
        if len(code) == 3:
            return bytes([int(code, 8)])
        if code not in _VALUES:
            raise PatchError(f"a path is damaged: got={inner[:200]!r} expected=a known escape")
        return _VALUES[code]

    return _ESCAPE.sub(value, inner)
