"""What the model sees of a command's output: readable text with its head and its tail."""

from __future__ import annotations

import re

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")  # terminal colours and cursor moves
_SURROGATE = re.compile("[\ud800-\udfff]")
_CONTROL = {code: f"\\x{code:02x}" for code in range(32) if code not in (9, 10, 13)}


def head_and_tail(text: str, max_chars: int, head_share: float = 0.5) -> str:
    """At most about ``max_chars`` of ``text``: its beginning, its end, and a mark between them.

    The mark says how much was left out, so a part never passes as the whole.
    """
    if len(text) <= max_chars:
        return text
    head = int(max_chars * head_share)
    tail = max_chars - head
    left_out = len(text) - head - tail
    mark = f"\n[… {left_out} characters left out …]\n"
    return text[:head] + mark + (text[-tail:] if tail else "")


def model_view(output: bytes, max_chars: int) -> str:
    """Command output for the model: lossy decoding, no terminal codes, control bytes shown.

    For the model's eyes only: patches and logs are kept as bytes elsewhere.
    """
    text = _ESCAPES.sub("", output.decode("utf-8", "replace"))
    return head_and_tail(text.translate(_CONTROL), max_chars)


def unicode_only(text: str) -> str:
    """``text`` as any tokenizer, file and endpoint takes it: half surrogate pairs, which stand for
    stray bytes or come from an escape in JSON, become the replacement character."""
    return _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text)
