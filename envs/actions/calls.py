"""Tools as a model is told about them, and the calls that it makes.

A grammar reads text and gives calls checked against the tools on offer. Whatever cannot be read
becomes a ``CallError`` with words for the model, so one bad call never ends an episode by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Argument = str | int | bool | tuple[int, ...]
ArgumentKind = Literal["string", "integer", "boolean", "integers"]

MAX_ARGUMENT_CHARS = 256 << 10


@dataclass(frozen=True)
class Parameter:
    """One argument of a tool. ``choices`` limits a string; ``integers`` is a list (a range)."""

    name: str
    description: str
    kind: ArgumentKind = "string"
    required: bool = True
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class ToolSpec:
    """A tool as the model is told about it."""

    name: str
    description: str
    parameters: tuple[Parameter, ...] = ()


@dataclass(frozen=True)
class ToolCall:
    """A call that fits its tool: known name, every required argument, right kinds."""

    name: str
    arguments: Mapping[str, Argument]

    def text(self, name: str, default: str = "") -> str:
        """Return a string argument, or ``default`` where it was left out."""
        value = self.arguments.get(name, default)
        return value if isinstance(value, str) else str(value)

    def number(self, name: str, default: int) -> int:
        """Return an integer argument, or ``default`` where it was left out."""
        value = self.arguments.get(name, default)
        return value if isinstance(value, int) else default


@dataclass(frozen=True)
class CallError:
    """A call that cannot be carried out; ``message`` is the reply that the model gets for it."""

    name: str
    message: str


@dataclass(frozen=True)
class ParsedAction:
    """Everything one completion asked for, in order. Never empty: no call is one ``CallError``."""

    calls: tuple[ToolCall | CallError, ...]
    thought: str = ""  # the text around the calls, thinking left out

    @property
    def malformed(self) -> bool:
        """True where nothing of it can be carried out."""
        return all(isinstance(call, CallError) for call in self.calls)
