"""Tools as JSON schema and as lines of text, for system prompts and for tool-calling endpoints."""

from __future__ import annotations

import json

from envs.actions.calls import Argument, Parameter, ToolSpec

JsonSchema = dict[str, object]


def json_schema(tool: ToolSpec) -> JsonSchema:
    """Return the OpenAI function-calling form of a tool."""
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": {
                "type": "object",
                "properties": {p.name: _property(p) for p in tool.parameters},
                "required": [p.name for p in tool.parameters if p.required],
            },
        },
    }


def parameter_lines(tool: ToolSpec) -> list[str]:
    """Return ``(1) name (kind, required): description`` for each parameter."""
    lines: list[str] = []
    for number, p in enumerate(tool.parameters, start=1):
        need = "required" if p.required else "optional"
        kind = "list of integers" if p.kind == "integers" else p.kind
        choices = f" One of: {', '.join(p.choices)}." if p.choices else ""
        lines.append(f"({number}) {p.name} ({kind}, {need}): {p.description}{choices}")
    return lines


def json_value(value: Argument) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def _property(parameter: Parameter) -> JsonSchema:
    shape: JsonSchema = {"description": parameter.description}
    if parameter.kind == "integers":
        shape |= {"type": "array", "items": {"type": "integer"}}
    else:
        shape["type"] = parameter.kind
    if parameter.choices:
        shape["enum"] = list(parameter.choices)
    return shape
