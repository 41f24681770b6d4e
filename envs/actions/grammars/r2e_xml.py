"""R2E-Gym's markup: ``<function=NAME><parameter=KEY>VALUE</parameter></function>``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from envs.actions.calls import CallError, ParsedAction, ToolCall, ToolSpec
from envs.actions.grammars.action_format import no_call, visible_text
from envs.actions.grammars.checking import check_call, limit_calls
from envs.actions.grammars.schema import json_value, parameter_lines

_OPEN = re.compile(r"<function\s*=\s*([^>\n]{1,200})>")
_PARAMETER = re.compile(r"\s*<parameter\s*=\s*([^>\n]{1,200})>")
# A value may itself contain the closing tag; the real one is followed by a parameter or the end.
_VALUE_END = re.compile(r"</parameter>(?=\s*(?:<parameter\s*=|</function>|\Z))")
_CLOSE = re.compile(r"\s*</function>")
_WORD = re.compile(r"\S")


class R2EXml:
    """A format with one call per turn by default, as R2E-Gym's agents write it."""

    name = "r2e_xml"
    stop_strings = ("</function>",)

    def __init__(self, max_calls: int = 1) -> None:
        self._max_calls = max_calls

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> ParsedAction:
        visible, unfinished = visible_text(text)
        calls: list[ToolCall | CallError] = []
        thought: list[str] = []
        position = 0
        while match := _OPEN.search(visible, position):
            thought.append(visible[position : match.start()])
            call, position = _read_call(match.group(1).strip(), visible, match.end(), tools)
            calls.append(call)
        thought.append(visible[position:])
        if not calls:
            calls.append(no_call("<function=NAME>…</function>", unfinished))
        return ParsedAction(limit_calls(calls, self._max_calls), "".join(thought).strip())

    def write(self, call: ToolCall) -> str:
        lines = [f"<function={call.name}>"]
        for key, value in call.arguments.items():
            shown = value if isinstance(value, str) else json_value(value)
            lines.append(f"<parameter={key}>\n{shown}\n</parameter>")
        return "\n".join([*lines, "</function>"])

    def describe(self, tools: Sequence[ToolSpec]) -> str:
        blocks: list[str] = []
        for tool in tools:
            blocks.append(f"---- BEGIN FUNCTION: {tool.name} ----\n{tool.description}")
            blocks += parameter_lines(tool)
            blocks.append(f"---- END FUNCTION: {tool.name} ----\n")
        how = (
            "Call one function a turn, exactly in this form, with nothing after it:\n"
            "<function=NAME>\n<parameter=KEY>VALUE</parameter>\n</function>"
        )
        return "\n".join([*blocks, how])

    def results(self, parsed: ParsedAction, replies: Sequence[str]) -> str:
        if len(replies) == 1:
            return replies[0]
        names = [call.name for call in parsed.calls]
        pairs = zip(names, replies, strict=True)
        return "\n\n".join(f"[{name or 'call'}]\n{reply}" for name, reply in pairs)


def _read_call(
    name: str, text: str, position: int, tools: Sequence[ToolSpec]
) -> tuple[ToolCall | CallError, int]:
    """Read the call whose opening tag ends at ``position``; returns it and the place to go on."""
    raw: dict[str, object] = {}
    while match := _PARAMETER.match(text, position):
        key = match.group(1).strip()
        end = _VALUE_END.search(text, match.end())
        if end is None:
            return CallError(name, f"{name}: parameter {key} has no </parameter>"), len(text)
        if key in raw:
            return CallError(name, f"{name}: parameter {key} is given twice"), end.end()
        raw[key] = _trim_newlines(text[match.end() : end.start()])
        position = end.end()
    close = _CLOSE.match(text, position)
    if close is None and _WORD.search(text, position):
        message = f"{name}: expected <parameter=KEY> or </function> after the opening tag"
        return CallError(name, message), _after_function(text, position)
    return check_call(name, raw, tools), close.end() if close else len(text)


def _after_function(text: str, position: int) -> int:
    end = text.find("</function>", position)
    return len(text) if end < 0 else end + len("</function>")


def _trim_newlines(value: str) -> str:
    """Drop the one line break beside each tag; indentation and further blank lines are content."""
    value = value.removeprefix("\r\n").removeprefix("\n") if value[:1] in "\r\n" else value
    return value.removesuffix("\n").removesuffix("\r") if value.endswith("\n") else value
