"""The protocol of an action format, one way to write tool calls as text, and what all share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from envs.actions.calls import CallError, ParsedAction, ToolCall, ToolSpec
from envs.actions.observation import unicode_only

_NOT_RUN = "not run: the episode is over"


class ActionFormat(Protocol):
    """One way of writing tool calls as text."""

    @property
    def name(self) -> str: ...

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings at which generation may stop; the text may then lack the string itself."""
        ...

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> ParsedAction:
        """Read one completion. Never raises; time is linear in the text."""
        ...

    def write(self, call: ToolCall) -> str:
        """Spell the call in this format; ``parse`` reads it back."""
        ...

    def describe(self, tools: Sequence[ToolSpec]) -> str:
        """Return the part of the system prompt that says how to call the tools."""
        ...

    def results(self, parsed: ParsedAction, replies: Sequence[str]) -> str:
        """Return one observation from the replies, one for each of ``parsed.calls``."""
        ...


def answer(action_format: ActionFormat, parsed: ParsedAction, replies: Sequence[str]) -> str:
    """Return the observation for an action; calls without a reply came after the episode's end."""
    missing = len(parsed.calls) - len(replies)
    return unicode_only(action_format.results(parsed, [*replies, *[_NOT_RUN] * missing]))


def visible_text(text: str) -> tuple[str, bool]:
    """Return the text after thinking, and True where a think block was left open.

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
    """Return the error for a completion without any call."""
    if unfinished_thought:
        return CallError("", f"the thinking did not end, so there was no call; expected {expected}")
    return CallError("", f"no call found; expected {expected}")
