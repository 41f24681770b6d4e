"""How an action's text becomes tool calls, and results become text."""

from __future__ import annotations

from typing import Protocol

from envs.tools import ToolBox, ToolCall, ToolResult


class MalformedActionError(Exception):
    """The action cannot be read; the message is what the agent is told."""


class Grammar(Protocol):
    """One way of speaking to the tools."""

    def parse(self, action: str, tools: ToolBox) -> tuple[ToolCall, ...]:
        """The calls of one action, in order. Raises MalformedActionError."""
        ...

    def render(self, results: tuple[ToolResult, ...]) -> str:
        """What the agent sees of them."""
        ...
