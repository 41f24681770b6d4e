"""The JSON form of Qwen and Hermes: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import cast

from envs.actions.calls import CallError, ParsedAction, ToolCall, ToolSpec
from envs.actions.grammars.action_format import no_call, visible_text
from envs.actions.grammars.checking import check_call, limit_calls
from envs.actions.grammars.schema import json_schema

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MAX_READ = 64  # calls; the decoder's errors take time in proportion to what lies before them
# strict=False: models write raw line breaks inside JSON strings
_DECODER = json.JSONDecoder(strict=False)


class HermesJson:
    """A format with several calls per turn; each gets its own ``<tool_response>``."""

    name = "hermes_json"
    stop_strings = ()

    def __init__(self, max_calls: int = 4) -> None:
        self._max_calls = max_calls

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> ParsedAction:
        visible, unfinished = visible_text(text)
        calls: list[ToolCall | CallError] = []
        thought: list[str] = []
        position = 0
        while (start := visible.find(_OPEN, position)) >= 0:
            thought.append(visible[position:start])
            if len(calls) >= _MAX_READ:
                calls += [CallError("", "not read")] * visible.count(_OPEN, start)
                position = len(visible)
                break
            call, position = _read_call(visible, start + len(_OPEN), tools)
            calls.append(call)
        thought.append(visible[position:])
        if not calls:
            calls.append(no_call(f"{_OPEN}{{…}}{_CLOSE}", unfinished))
        return ParsedAction(limit_calls(calls, self._max_calls), "".join(thought).strip())

    def write(self, call: ToolCall) -> str:
        body = {"name": call.name, "arguments": dict(call.arguments)}
        return f"{_OPEN}\n{json.dumps(body, ensure_ascii=False)}\n{_CLOSE}"

    def describe(self, tools: Sequence[ToolSpec]) -> str:
        lines = [json.dumps(json_schema(tool), ensure_ascii=False) for tool in tools]
        return "\n".join(
            [
                "You may call one or more functions. Their signatures:",
                "<tools>",
                *lines,
                "</tools>",
                "For each call return a JSON object in tool_call tags:",
                f'{_OPEN}\n{{"name": NAME, "arguments": {{"KEY": VALUE}}}}\n{_CLOSE}',
            ]
        )

    def results(self, parsed: ParsedAction, replies: Sequence[str]) -> str:
        del parsed  # replies are told apart by their order, as the chat templates do
        return "\n".join(f"<tool_response>\n{reply}\n</tool_response>" for reply in replies)


def _read_call(
    text: str, start: int, tools: Sequence[ToolSpec]
) -> tuple[ToolCall | CallError, int]:
    """Read the call after an opening tag; returns it and the place where reading goes on.

    The JSON decides where the call ends, so a closing tag inside a string is content.
    """
    while start < len(text) and text[start].isspace():
        start += 1
    try:
        value, end = cast(tuple[object, int], _DECODER.raw_decode(text, start))
    except (ValueError, RecursionError) as error:
        return CallError("", f"the call is not valid JSON: {error}"), _after_close(text, start)
    after = _after_close(text, end)
    rest = text[end : after - len(_CLOSE)] if text[:after].endswith(_CLOSE) else text[end:after]
    if rest.strip():
        return CallError("", f"expected {_CLOSE} after the JSON object"), after
    return _check(value, tools), after


def _check(value: object, tools: Sequence[ToolSpec]) -> ToolCall | CallError:
    if not isinstance(value, dict):
        return CallError("", f"the call is a JSON {type(value).__name__}, expected an object")
    body = cast(dict[str, object], value)
    name, arguments = body.get("name"), body.get("arguments", {})
    if not isinstance(name, str):
        return CallError("", 'the call has no "name"')
    if isinstance(arguments, str):  # some models encode the object twice
        try:
            arguments = cast(object, _DECODER.decode(arguments))
        except (ValueError, RecursionError):
            return CallError(name, f"{name}: arguments are a string, expected an object")
    if not isinstance(arguments, dict):
        kind = type(arguments).__name__
        return CallError(name, f"{name}: arguments are a JSON {kind}, expected an object")
    return check_call(name, cast(Mapping[str, object], arguments), tools)


def _after_close(text: str, position: int) -> int:
    end = text.find(_CLOSE, position)
    return len(text) if end < 0 else end + len(_CLOSE)
