"""What a model says, as tool calls: the types that every action format shares.

A format reads text and gives calls checked against the tools on offer. Whatever cannot be read
becomes a ``CallError`` with words for the model, so one bad call never ends an episode by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

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
        """A string argument, or ``default`` where it was left out."""
        value = self.arguments.get(name, default)
        return value if isinstance(value, str) else str(value)


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
        """Whether nothing of it can be carried out."""
        return all(isinstance(call, CallError) for call in self.calls)


class ActionFormat(Protocol):
    """One way of writing tool calls as text."""

    @property
    def name(self) -> str: ...

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Where generation may stop; the string itself may be missing from the text then."""
        ...

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> ParsedAction:
        """Read one completion. Never raises; time is linear in the text."""
        ...

    def write(self, call: ToolCall) -> str:
        """The call as this format spells it; ``parse`` reads it back."""
        ...

    def describe(self, tools: Sequence[ToolSpec]) -> str:
        """The part of the system prompt that says how to call the tools."""
        ...

    def results(self, parsed: ParsedAction, replies: Sequence[str]) -> str:
        """One observation from the replies, one for each of ``parsed.calls``."""
        ...


def visible_text(text: str) -> tuple[str, bool]:
    """The text after thinking, and whether a think block was left open.

    Tags inside ``<think>`` are musings, not calls. Some templates open the block in the prompt,
    so a completion may hold only the closing tag.
    """
    _, closed, tail = text.rpartition("</think>")
    visible = tail if closed else text
    start = visible.find("<think>")
    if start < 0:
        return visible, False
    return visible[:start], True


def no_call(expected: str, unfinished_thought: bool) -> CallError:
    """The error for a completion without any call."""
    if unfinished_thought:
        return CallError("", f"the thinking did not end, so there was no call; expected {expected}")
    return CallError("", f"no call found; expected {expected}")
