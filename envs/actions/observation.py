"""Observations: a command's output as readable text with its head and its tail."""

from __future__ import annotations

import re

from envs.base import ExecResult

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")  # terminal colours and cursor moves
_SURROGATE = re.compile("[\ud800-\udfff]")
_CONTROL = {code: f"\\x{code:02x}" for code in range(32) if code not in (9, 10, 13)}


def head_and_tail(text: str, max_chars: int, head_share: float = 0.5) -> str:
    """Cut ``text`` to about ``max_chars``: its beginning, its end, and a mark between them.

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
    """Decode command output for the model: lossily, without terminal codes, control bytes shown.

    For the model's eyes only: patches and logs are kept as bytes elsewhere.
    """
    text = _ESCAPES.sub("", output.decode("utf-8", "replace"))
    return head_and_tail(text.translate(_CONTROL), max_chars)


def unicode_only(text: str) -> str:
    """Replace half surrogate pairs, which no tokenizer, file or endpoint takes.

    They stand for stray bytes or come from an escape in JSON.
    """
    return _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text)


def command_reply(result: ExecResult, max_chars: int) -> str:
    """Return a command's output for the model, with how it ended on the last line."""
    return f"{model_view(result.output, max_chars)}\n[{_ending(result)}]"


def _ending(result: ExecResult) -> str:
    if result.timed_out or result.cpu_exceeded:
        return f"killed after {result.seconds:.0f} s: time limit"
    if result.oom:
        return "killed: out of memory"
    return "killed" if result.exit_code is None else f"exit code {result.exit_code}"
