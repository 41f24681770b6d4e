"""The protocol of a grammar over a work tree: an action's text to calls, results to a reply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from envs.actions.calls import CallError, ToolCall
from envs.actions.workspace_tools import ToolResult, WorkspaceTools


@dataclass(frozen=True)
class Spoken:
    """The calls that one action asks for, and the way to answer it.

    ``calls`` is never empty; text that cannot be read is a ``CallError``. ``reply`` takes one
    result per call, fewer when a submission ended the episode.
    """

    calls: tuple[ToolCall | CallError, ...]
    reply: Callable[[Sequence[ToolResult]], str]


class Grammar(Protocol):
    """One way of speaking to the tools."""

    def read(self, action: str, tools: WorkspaceTools) -> Spoken:
        """Read an action. Never raises for anything that it says."""
        ...
