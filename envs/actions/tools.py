"""The agent's tools: typed calls in, typed results out. Grammars stand in front of this.

A tool never raises for something the agent did: that is a :class:`Refused` result. What it raises
is infrastructure trouble.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from envs.base import ExecResult, Task
from envs.errors import SandboxFullError, TaskError, WorkspaceError
from envs.grading.suite import SuiteReport, SuiteRunner
from envs.patches.diff import split_lines
from envs.workspace import Workspace


@dataclass(frozen=True)
class View:
    """Lines ``start`` to ``end`` of a file, counted from 1, both included; 0 is the last line."""

    path: str
    start: int = 1
    end: int = 0


@dataclass(frozen=True)
class Search:
    """Lines that hold ``text``, in files whose path starts with ``path``.

    Plain text: a regular expression from the agent could keep this process busy for ever.
    """

    text: str
    path: str = ""


@dataclass(frozen=True)
class ReplaceLines:
    """Put ``text`` in the place of lines ``start`` to ``end``."""

    path: str
    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Edit:
    """Replace the one occurrence of ``old`` by ``new``."""

    path: str
    old: str
    new: str


@dataclass(frozen=True)
class Create:
    """Write a file that does not exist yet."""

    path: str
    text: str


@dataclass(frozen=True)
class Bash:
    """Run a shell command in the work folder."""

    command: str


@dataclass(frozen=True)
class RunTests:
    """Run the visible tests."""


@dataclass(frozen=True)
class Submit:
    """End the episode."""


@dataclass(frozen=True)
class Invalid:
    """What a grammar makes of text that it cannot read; the box refuses it."""

    reason: str


ToolCall = View | Search | ReplaceLines | Edit | Create | Bash | RunTests | Submit | Invalid


@dataclass(frozen=True)
class Listing:
    """Numbered lines: (path, number from 1, text without its newline)."""

    lines: tuple[tuple[str, int, str], ...]
    num_left_out: int = 0


@dataclass(frozen=True)
class Done:
    """The call did what it says and there is nothing more to tell."""


@dataclass(frozen=True)
class Refused:
    """The call makes no sense here; nothing was changed."""

    reason: str
    kind: Literal["call", "lines", "path"] = "call"


@dataclass(frozen=True)
class Submitted:
    """The episode is over."""


ToolResult = Listing | Done | Refused | Submitted | SuiteReport | ExecResult


@dataclass(frozen=True)
class ToolLimits:
    """What one call may cost."""

    max_lines: int = 400
    bash_timeout_s: float = 60.0
    output_cap_bytes: int = 32 << 10


class ToolBox:
    """The tools over one episode's work tree."""

    def __init__(
        self,
        task: Task,
        workspace: Workspace,
        runner: SuiteRunner,
        limits: ToolLimits | None = None,
    ) -> None:
        self._task, self._workspace, self._runner = task, workspace, runner
        self._limits = limits or ToolLimits()
        self._tools: Mapping[type, Callable[..., ToolResult]] = {
            View: self._view,
            Search: self._search,
            ReplaceLines: self._replace_lines,
            Edit: self._edit,
            Create: self._create,
            Bash: self._bash,
            RunTests: self._run_tests,
            Invalid: self._invalid,
            Submit: self._submit,
        }

    @property
    def task(self) -> Task:
        return self._task

    @property
    def workspace(self) -> Workspace:
        return self._workspace

    def run(self, call: ToolCall) -> ToolResult:
        """Carry out one call; mutates the work tree. Raises InfrastructureError."""
        try:
            return self._tools[type(call)](call)
        except (WorkspaceError, SandboxFullError) as error:
            return Refused(str(error), "path")

    def _view(self, call: View) -> ToolResult:
        lines = _text(self._workspace.read(call.path)).split("\n")
        if lines[-1] == "":
            lines.pop()
        end = call.end or len(lines)
        if not 1 <= call.start <= end <= len(lines) and lines:
            return Refused(_bad_range(call.start, call.end, len(lines)), "lines")
        numbered = [(call.path, i + 1, lines[i]) for i in range(call.start - 1, end)]
        return self._listing(numbered)

    def _search(self, call: Search) -> ToolResult:
        if not call.text:
            return Refused("nothing to search for: got='' expected some text")
        found = [
            (path, number, line)
            for path, data in sorted(self._workspace.snapshot().items())
            if path.startswith(call.path)
            for number, line in enumerate(_text(data).split("\n"), start=1)
            if call.text in line
        ]
        return self._listing(found)

    def _replace_lines(self, call: ReplaceLines) -> ToolResult:
        lines = split_lines(self._workspace.read(call.path))
        if not 1 <= call.start <= call.end <= len(lines):
            return Refused(_bad_range(call.start, call.end, len(lines)), "lines")
        new = _bytes(call.text)
        if lines[call.end - 1].endswith(b"\n") and new and not new.endswith(b"\n"):
            new += b"\n"
        lines[call.start - 1 : call.end] = [new]
        self._workspace.write(call.path, b"".join(lines))
        return Done()

    def _edit(self, call: Edit) -> ToolResult:
        data = self._workspace.read(call.path)
        old = _bytes(call.old)
        count = data.count(old) if old else 0
        if count != 1:
            return Refused(f"the text to replace must occur once: got={count} expected=1")
        new = _bytes(call.new)
        self._workspace.write(call.path, data.replace(old, new))
        return Done()

    def _create(self, call: Create) -> ToolResult:
        try:
            self._workspace.read(call.path)
        except WorkspaceError:
            data = _bytes(call.text)
            self._workspace.write(call.path, data)
            return Done()
        return Refused(f"{call.path!r} exists: got=create expected=an edit")

    def _bash(self, call: Bash) -> ToolResult:
        if b"\0" in _bytes(call.command):
            return Refused("a command cannot hold a NUL byte")
        return self._workspace.exec(
            ["bash", "-c", call.command],
            timeout_s=self._limits.bash_timeout_s,
            output_cap_bytes=self._limits.output_cap_bytes,
        )

    def _run_tests(self, call: RunTests) -> ToolResult:
        files = self._workspace.snapshot()
        tests = {path: files.pop(path) for path in self._task.visible_tests if path in files}
        if not tests:
            return Refused("there is no visible test to run")
        try:
            return self._runner.run(files, tests)
        except TaskError as error:  # the agent has rewritten a test into something else
            return Refused(str(error))

    def _submit(self, call: Submit) -> ToolResult:
        return Submitted()

    def _invalid(self, call: Invalid) -> ToolResult:
        return Refused(call.reason)

    def _listing(self, lines: list[tuple[str, int, str]]) -> Listing:
        cap = self._limits.max_lines
        return Listing(tuple(lines[:cap]), max(0, len(lines) - cap))


def _text(data: bytes) -> str:
    """For reading only: bytes that are not UTF-8 come back unchanged when written again."""
    return data.decode("utf-8", "surrogateescape")


def _bytes(text: str) -> bytes:
    """The inverse of ``_text``. Raises WorkspaceError for half a surrogate pair."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise WorkspaceError(f"text cannot be written: got={error} expected=Unicode") from error


def _bad_range(start: int, end: int, num_lines: int) -> str:
    return f"no such lines: got={start}-{end} expected=1 to {num_lines}"
