"""How an action's text becomes tool calls, and their results become text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from envs.tools import ToolBox, ToolCall, ToolResult


@dataclass(frozen=True)
class SpokenCall:
    """One call of an action; ``call_id`` is the agent's name for it, if its grammar has one."""

    call: ToolCall
    call_id: str = ""


class Grammar(Protocol):
    """One way of speaking to the tools. Unreadable text becomes ``Invalid`` calls, never errors."""

    def parse(self, action: str, tools: ToolBox) -> tuple[SpokenCall, ...]:
        """The calls of one action, in order; at least one."""
        ...

    def render(self, calls: Sequence[SpokenCall], results: Sequence[ToolResult]) -> str:
        """What the agent sees. ``results`` is shorter when a submission ended the episode."""
        ...
