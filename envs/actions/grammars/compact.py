"""The grammar of the tiny policy: ``view``, ``test``, ``replace N CODE``, ``submit``.

Replies are one short line: ``ok``, ``bad line``, ``bad tool``, ``pass``, ``fail CALL got X want
Y``, ``error NAME``. Lines are those of the function in the task's focus file, without their
indentation, counted from the line after ``def``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

from envs.actions.calls import CallError, ToolCall
from envs.actions.grammars.grammar import Spoken
from envs.actions.workspace_tools import (
    Done,
    Listing,
    Refused,
    Submitted,
    ToolResult,
    WorkspaceTools,
)
from envs.errors import WorkspaceError
from envs.grading.suite import SuiteReport

_REPLACE = re.compile(r"replace (\d{1,6}) (\S.*)")
_HEADER = re.compile(r"(if|elif|else|for|while|with|try|except|finally)\b.*:\Z", re.DOTALL)
_MAX_CODE = 500
_MAX_REPLY = 200
_INDENT = 4


@dataclass(frozen=True)
class _Body:
    """The place of a function's body in its file: first and last line, counted from 1."""

    first: int
    last: int
    lines: tuple[str, ...]  # the file's lines


class CompactGrammar:
    """Compact words in front of the tools; holds no state."""

    def read(self, action: str, tools: WorkspaceTools) -> Spoken:
        return Spoken((_parse(action.strip(), tools),), _reply)


def _reply(results: Sequence[ToolResult]) -> str:
    return "\n".join(_render(result) for result in results)


def _parse(action: str, tools: WorkspaceTools) -> ToolCall | CallError:
    if action in ("test", "submit"):
        return ToolCall(action, {})
    match = _REPLACE.fullmatch(action)
    if action != "view" and match is None:
        return CallError("", "bad tool")
    path = tools.task.focus_path
    try:
        body = find_body(tools.workspace.read(path).decode("utf-8", "surrogateescape"))
    except WorkspaceError as error:
        return CallError("", str(error))
    if match is None:
        return ToolCall("view", {"path": path, "start": body.first, "end": body.last})
    return _replace(path, int(match[1]), match[2], body)


def find_body(source: str) -> _Body:
    """Find the first function's body, or the whole file where there is no ``def``."""
    lines = tuple(source.split("\n"))
    starts = [i for i, line in enumerate(lines) if line.startswith("def ")]
    first = starts[0] + 1 if starts else 0  # index of the body's first line
    last = first
    for index in range(first, len(lines)):
        if starts and lines[index][:1] not in ("", " ", "\t"):
            break
        if lines[index].strip():
            last = index
    return _Body(first + 1, last + 1, lines)


def _replace(path: str, number: int, code: str, body: _Body) -> ToolCall:
    line, text = 0, ""  # refused by the tool: no such line
    if 1 <= number <= body.last - body.first + 1:
        line = body.first + number - 1
        old = body.lines[line - 1]
        text = old[: len(old) - len(old.lstrip())] + tidy(code.strip())
    return ToolCall("replace_lines", {"path": path, "start": line, "end": line, "text": text})


def tidy(code: str) -> str:
    """Write one line of Python as usual; text that is not Python stays as it is.

    ``t . append ( v + 3 )`` becomes ``t.append(v + 3)``.
    """
    if len(code) > _MAX_CODE:
        return code
    header = _HEADER.match(code)
    if code in ("else :", "try :", "finally :"):
        return code.replace(" ", "")
    before, after = "", ""
    if header:
        before = {"elif": "if 0:\n pass\n", "except": "try:\n pass\n"}.get(header[1], "")
        after = "\n pass"
    try:
        lines = ast.unparse(ast.parse(before + code + after)).split("\n")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return code
    if header:
        skipped = 2 if before else 0
        return lines[skipped] if len(lines) == skipped + 2 else code
    return lines[0] if len(lines) == 1 else code


def _render(result: ToolResult) -> str:
    match result:
        case Listing():
            return "\n".join(
                f"{index} {text.strip()}" for index, (_, _, text) in enumerate(result.lines, 1)
            )
        case Done():
            return "ok"
        case SuiteReport():
            return _render_report(result)
        case Submitted():
            return ""
        case Refused(kind="lines"):
            return "bad line"
        case _:
            return "bad tool"


def _render_report(report: SuiteReport) -> str:
    failure = report.failure
    if failure is None:
        return "pass"
    if failure.kind == "mismatch":
        text = f"fail {failure.call} got {failure.got} want {failure.want}"
    else:
        text = f"error {failure.got if failure.kind == 'exception' else failure.kind}"
    return text if len(text) <= _MAX_REPLY else f"{text[:_MAX_REPLY]} ..."
