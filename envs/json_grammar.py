"""Tool calls as JSON, for models that were taught function calling.

An action is one call ``{"name": "view", "arguments": {"path": "a.py"}, "id": "c1"}`` or a list of
them; ``arguments`` may itself be a JSON string, as OpenAI's interface has it. Each call gets its
own answer, also the ones that cannot be read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any, cast

from envs.base import ExecResult
from envs.grammar import SpokenCall
from envs.testing import SuiteReport
from envs.tools import (
    Bash,
    Create,
    Done,
    Edit,
    Invalid,
    Listing,
    Refused,
    ReplaceLines,
    RunTests,
    Search,
    Submit,
    Submitted,
    ToolBox,
    ToolCall,
    ToolResult,
    View,
)

TOOLS: dict[str, type[ToolCall]] = {
    "view": View,
    "search": Search,
    "replace_lines": ReplaceLines,
    "edit": Edit,
    "create": Create,
    "bash": Bash,
    "test": RunTests,
    "submit": Submit,
}
_TYPES: dict[str, type] = {"str": str, "int": int}  # annotations are strings in that module
_MAX_ACTION = 256 << 10
_MAX_CALLS = 8
_LOG_TAIL_BYTES = 4000


class JsonGrammar:
    """One parser in front of the tool box; holds no state."""

    def parse(self, action: str, tools: ToolBox) -> tuple[SpokenCall, ...]:
        if len(action) > _MAX_ACTION:
            return _invalid(f"action too long: got={len(action)} expected<={_MAX_ACTION}")
        try:
            spoken = json.loads(action)
        except (ValueError, RecursionError) as error:
            return _invalid(f"not JSON: {error}")
        calls = cast("list[Any]", spoken) if isinstance(spoken, list) else [spoken]
        if not 1 <= len(calls) <= _MAX_CALLS:
            return _invalid(f"got {len(calls)} calls, expected 1 to {_MAX_CALLS}")
        return tuple(_read_call(call) for call in calls)

    def render(self, calls: Sequence[SpokenCall], results: Sequence[ToolResult]) -> str:
        texts = [_render(result) for result in results]
        if len(calls) == 1:
            return texts[0]
        names = [spoken.call_id or str(i) for i, spoken in enumerate(calls, start=1)]
        return "\n".join(f"[{name}] {text}" for name, text in zip(names, texts, strict=False))


def tool_schemas() -> list[dict[str, Any]]:
    """Every tool as a JSON-schema function, for a model's prompt."""
    schemas: list[dict[str, Any]] = []
    for name, tool in TOOLS.items():
        json_types = {"str": "string", "int": "integer"}
        properties = {f.name: {"type": json_types[str(f.type)]} for f in fields(tool)}
        required = [f.name for f in fields(tool) if f.default is MISSING]
        parameters = {"type": "object", "properties": properties, "required": required}
        function = {"name": name, "description": tool.__doc__, "parameters": parameters}
        schemas.append({"type": "function", "function": function})
    return schemas


def _invalid(reason: str, call_id: str = "") -> tuple[SpokenCall, ...]:
    return (SpokenCall(Invalid(reason), call_id),)


def _read_call(spoken: Any) -> SpokenCall:
    if not isinstance(spoken, dict):
        return SpokenCall(Invalid(f"a call must be an object, got {type(spoken).__name__}"))
    call = cast("dict[str, Any]", spoken)
    call_id = str(call.get("id", ""))[:64]
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(name, str) or name not in TOOLS:
        return SpokenCall(
            Invalid(f"unknown tool {name!r:.80}, expected one of {list(TOOLS)}"), call_id
        )
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return SpokenCall(Invalid(f"arguments of {name} are not JSON: {error}"), call_id)
    if not isinstance(arguments, dict):
        kind = type(arguments).__name__
        return SpokenCall(Invalid(f"arguments of {name} must be an object, got {kind}"), call_id)
    return SpokenCall(_typed(TOOLS[name], name, cast("dict[str, Any]", arguments)), call_id)


def _typed(tool: type[ToolCall], name: str, arguments: dict[str, Any]) -> ToolCall:
    known = {f.name: f for f in fields(tool)}
    for key, value in arguments.items():
        if key not in known:
            return Invalid(f"{name} has no argument {key!r:.80}, expected {list(known)}")
        wanted = _TYPES[str(known[key].type)]
        if type(value) is not wanted:
            got = type(value).__name__
            return Invalid(f"argument {key} of {name} is {got}, expected {wanted.__name__}")
    missing = [k for k, f in known.items() if f.default is MISSING and k not in arguments]
    if missing:
        return Invalid(f"{name} lacks {missing}")
    return tool(**arguments)


def _render(result: ToolResult) -> str:
    match result:
        case Listing():
            several = len({path for path, _, _ in result.lines}) > 1
            lines = [
                f"{path}:{number}: {text}" if several else f"{number}\t{text}"
                for path, number, text in result.lines
            ]
            if result.num_left_out:
                lines.append(f"[... {result.num_left_out} lines left out ...]")
            return _visible("\n".join(lines)) if lines else "nothing found"
        case Done():
            return "ok"
        case Refused():
            return _visible(f"error: {result.reason}")
        case Submitted():
            return "submitted"
        case SuiteReport():
            return _render_report(result)
        case ExecResult():
            return _render_exec(result)


def _render_report(report: SuiteReport) -> str:
    counts = {
        status: list(report.statuses.values()).count(status) for status in report.statuses.values()
    }
    summary = ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
    if report.passed:
        return f"all tests pass: {summary}"
    tail = report.log[-_LOG_TAIL_BYTES:].decode(errors="replace")
    broken = "" if report.complete else " (the run broke off)"
    return f"tests fail{broken}: {summary or 'none ran'}\n{tail}"


def _render_exec(result: ExecResult) -> str:
    text = result.output.decode(errors="replace")
    if result.timed_out or result.cpu_exceeded:
        return f"{text}\n[killed after {result.seconds:.0f} s: time limit]"
    code = "killed" if result.exit_code is None else f"exit code {result.exit_code}"
    return f"{text}\n[{code}]"


def _visible(text: str) -> str:
    """Bytes that are not UTF-8, kept as surrogates in the tools, replaced for the model's view."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
