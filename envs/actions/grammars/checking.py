"""Checks of a raw call against the tools on offer, with conversion of its arguments."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import cast

from envs.actions.calls import (
    MAX_ARGUMENT_CHARS,
    Argument,
    CallError,
    Parameter,
    ToolCall,
    ToolSpec,
)

_MAX_LATE = 8  # calls over the limit that get a reply each


class _UnusableError(ValueError):
    """An argument that does not fit; the text is for the model."""


def check_call(
    name: str, raw: Mapping[str, object], tools: Sequence[ToolSpec]
) -> ToolCall | CallError:
    """Return a typed call, or words for the model about the first thing that is wrong with it.

    ``raw`` holds strings (from markup) or JSON values.
    """
    spec = next((tool for tool in tools if tool.name == name), None)
    if spec is None:
        return CallError(name, _unknown("tool", name, [tool.name for tool in tools]))
    known = {parameter.name: parameter for parameter in spec.parameters}
    arguments: dict[str, Argument] = {}
    for key, value in raw.items():
        if key not in known:
            return CallError(name, f"{name}: {_unknown('parameter', key, list(known))}")
        try:
            arguments[key] = _convert(known[key], value)
        except _UnusableError as error:
            return CallError(name, f"{name}: {error}")
    missing = [p.name for p in spec.parameters if p.required and p.name not in arguments]
    if missing:
        return CallError(name, f"{name}: missing parameter {', '.join(missing)}")
    return ToolCall(name, arguments)


def limit_calls(
    calls: Sequence[ToolCall | CallError], max_calls: int
) -> tuple[ToolCall | CallError, ...]:
    """Turn calls beyond the limit into errors, so that none is dropped in silence."""
    message = f"not carried out: at most {max_calls} call(s) a turn"
    late = [CallError(call.name, message) for call in calls[max_calls:]]
    if len(late) > _MAX_LATE:
        rest = len(late) - _MAX_LATE
        late = [*late[:_MAX_LATE], CallError("", f"{rest} further calls not carried out")]
    return (*calls[:max_calls], *late)


def _convert(parameter: Parameter, value: object) -> Argument:
    label = f"parameter {parameter.name}"
    if isinstance(value, str) and len(value) > MAX_ARGUMENT_CHARS:
        raise _UnusableError(f"{label} has {len(value)} characters, at most {MAX_ARGUMENT_CHARS}")
    if parameter.kind == "string":
        if not isinstance(value, str):
            raise _UnusableError(f"{label} got {_short(value)}, expected a string")
        if parameter.choices and value.strip() not in parameter.choices:
            options = ", ".join(parameter.choices)
            raise _UnusableError(f"{label} got {_short(value)}, expected one of {options}")
        return value.strip() if parameter.choices else value
    return _from_json(parameter, value, label)


def _from_json(parameter: Parameter, value: object, label: str) -> Argument:
    if isinstance(value, str):
        try:
            text = value.strip().lower() if parameter.kind == "boolean" else value
            value = cast(object, json.loads(text))
        except (ValueError, RecursionError):
            raise _UnusableError(
                f"{label} got {_short(value)}, expected {parameter.kind}"
            ) from None
    if parameter.kind == "boolean" and isinstance(value, bool):
        return value
    if parameter.kind == "integer" and isinstance(value, int) and not isinstance(value, bool):
        return value
    if parameter.kind == "integers" and (numbers := _integers(value)) is not None:
        return numbers
    expected = "a list of integers" if parameter.kind == "integers" else parameter.kind
    raise _UnusableError(f"{label} got {_short(value)}, expected {expected}")


def _integers(value: object) -> tuple[int, ...] | None:
    items = cast(list[object], value) if isinstance(value, list) else [None]
    numbers = tuple(item for item in items if type(item) is int)
    return numbers if len(numbers) == len(items) else None


def _unknown(what: str, got: str, valid: Sequence[str]) -> str:
    near = difflib.get_close_matches(got[:80], valid, n=1)
    hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(valid) or 'none'}"
    return f"unknown {what} {_short(got)}; {hint}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
