"""How an action's text becomes tool calls, and their results become text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from envs.actions.tools import ToolBox, ToolCall, ToolResult


@dataclass(frozen=True)
class Spoken:
    """What one action asks for, and how to answer it.

    ``calls`` is never empty; text that cannot be read is an ``Invalid`` call. ``reply`` takes one
    result a call, fewer when a submission ended the episode.
    """

    calls: tuple[ToolCall, ...]
    reply: Callable[[Sequence[ToolResult]], str]


class Grammar(Protocol):
    """One way of speaking to the tools."""

    def read(self, action: str, tools: ToolBox) -> Spoken:
        """Never raises for anything that the action says."""
        ...
