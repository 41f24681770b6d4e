"""The tools over a work tree: calls in, typed results out. A grammar writes both as text.

A tool never raises for something the agent did: that is a :class:`Refused` result. What it raises
is infrastructure trouble.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from envs.actions.calls import CallError, ToolCall
from envs.actions.edits import (
    RefusedEditError,
    check_lines,
    replace_lines,
    replace_once,
    to_bytes,
    to_text,
)
from envs.base import ExecResult, Task
from envs.errors import SandboxFullError, TaskError, WorkspaceError
from envs.grading.suite import SuiteReport, SuiteRunner
from envs.workspace import Workspace


@dataclass(frozen=True)
class Listing:
    """Numbered lines: (path, number from 1, text without its newline)."""

    lines: tuple[tuple[str, int, str], ...]
    num_left_out: int = 0


@dataclass(frozen=True)
class Done:
    """A call that did what it says; there is nothing more to tell."""


@dataclass(frozen=True)
class Refused:
    """A call that makes no sense here; nothing was changed."""

    reason: str
    kind: Literal["call", "lines", "path"] = "call"


@dataclass(frozen=True)
class Submitted:
    """The end of the episode."""


ToolResult = Listing | Done | Refused | Submitted | SuiteReport | ExecResult


@dataclass(frozen=True)
class ToolLimits:
    """Limits of one call."""

    max_lines: int = 400
    bash_timeout_s: float = 60.0
    output_cap_bytes: int = 32 << 10


class WorkspaceTools:
    """The tools of ``tool_specs.WORKSPACE_TOOLS`` over one episode's work tree."""

    def __init__(
        self,
        task: Task,
        workspace: Workspace,
        runner: SuiteRunner,
        limits: ToolLimits | None = None,
    ) -> None:
        self._task, self._workspace, self._runner = task, workspace, runner
        self._limits = limits or ToolLimits()
        self._tools: Mapping[str, Callable[[ToolCall], ToolResult]] = {
            "view": self._view,
            "search": self._search,
            "replace_lines": self._replace_lines,
            "edit": self._edit,
            "create": self._create,
            "bash": self._bash,
            "test": self._run_tests,
            "submit": lambda call: Submitted(),
        }

    @property
    def task(self) -> Task:
        return self._task

    @property
    def workspace(self) -> Workspace:
        return self._workspace

    def run(self, call: ToolCall | CallError) -> ToolResult:
        """Carry out one call; mutates the work tree. Raises InfrastructureError."""
        if isinstance(call, CallError):
            return Refused(call.message)
        try:
            return self._tools[call.name](call)
        except RefusedEditError as error:
            return Refused(str(error), error.kind)
        except (WorkspaceError, SandboxFullError) as error:
            return Refused(str(error), "path")

    def _view(self, call: ToolCall) -> ToolResult:
        path = call.text("path")
        lines = to_text(self._workspace.read(path)).split("\n")
        if lines[-1] == "":
            lines.pop()
        start, asked = call.number("start", 1), call.number("end", 0)
        end = asked or len(lines)
        if lines:
            check_lines(start, end, len(lines), asked)
        return self._listing(
            [(path, number, line) for number, line in enumerate(lines[start - 1 : end], start)]
        )

    def _search(self, call: ToolCall) -> ToolResult:
        """Search for plain text: a regular expression from the agent could keep this process busy
        for ever."""
        text = call.text("text")
        if not text:
            return Refused("nothing to search for: got='' expected some text")
        found = [
            (path, number, line)
            for path, content in sorted(self._workspace.snapshot().items())
            if path.startswith(call.text("path"))
            for number, line in enumerate(to_text(content).split("\n"), start=1)
            if text in line
        ]
        return self._listing(found)

    def _listing(self, lines: list[tuple[str, int, str]]) -> Listing:
        cap = self._limits.max_lines
        return Listing(tuple(lines[:cap]), max(0, len(lines) - cap))

    def _replace_lines(self, call: ToolCall) -> ToolResult:
        path, start, end = call.text("path"), call.number("start", 0), call.number("end", 0)
        content = self._workspace.read(path)
        changed = replace_lines(content, start, end, to_bytes(call.text("text")))
        self._workspace.write(path, changed)
        return Done()

    def _edit(self, call: ToolCall) -> ToolResult:
        path, old, new = call.text("path"), call.text("old"), call.text("new")
        content = self._workspace.read(path)
        rule = "the text to replace must occur once"
        self._workspace.write(path, replace_once(content, to_bytes(old), to_bytes(new), rule))
        return Done()

    def _create(self, call: ToolCall) -> ToolResult:
        path = call.text("path")
        try:
            self._workspace.read(path)
        except WorkspaceError:
            self._workspace.write(path, to_bytes(call.text("text")))
            return Done()
        return Refused(f"{path!r} exists: got=create expected=an edit")

    def _bash(self, call: ToolCall) -> ToolResult:
        command = call.text("command")
        if b"\0" in to_bytes(command):
            return Refused("a command cannot hold a NUL byte")
        return self._workspace.exec(
            ["bash", "-c", command],
            timeout_s=self._limits.bash_timeout_s,
            output_cap_bytes=self._limits.output_cap_bytes,
        )

    def _run_tests(self, call: ToolCall) -> ToolResult:
        del call
        files = self._workspace.snapshot()
        tests = {path: files.pop(path) for path in self._task.visible_tests if path in files}
        if not tests:
            return Refused("there is no visible test to run")
        try:
            return self._runner.run(files, tests)
        except TaskError as error:  # the agent has rewritten a test into something else
            return Refused(str(error))
