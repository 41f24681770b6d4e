"""The software-engineering environment: a task, a work tree, tools, a grammar and a judge."""

from __future__ import annotations

from envs.actions.calls import CallError
from envs.actions.grammars.compact import CompactGrammar
from envs.actions.grammars.grammar import Grammar
from envs.actions.workspace_tools import Submitted, ToolLimits, ToolResult, WorkspaceTools
from envs.base import Observation, Score, Task
from envs.errors import EpisodeError, InfrastructureError, WorkspaceError
from envs.grading.grade import grade
from envs.grading.suite import SuiteRunner
from envs.patches.diff import diff_trees
from envs.workspace import StartSandbox, Workspace


class SweEnv:
    """One episode on one task; implements the ``Env`` protocol.

    Example:
        >>> env = SweEnv(task, runner)
        >>> env.reset().text
        'fix affine : x times 3 plus 4'
        >>> env.step("view").text
        '1 t = x * 2\\n2 return t + 4'
    """

    def __init__(
        self,
        task: Task,
        runner: SuiteRunner,
        *,
        grammar: Grammar | None = None,
        start_sandbox: StartSandbox | None = None,
        tool_limits: ToolLimits | None = None,
    ) -> None:
        """Set up; ``start_sandbox`` is needed for shell commands only."""
        self._task, self._runner = task, runner
        self._grammar = grammar or CompactGrammar()
        self._start_sandbox, self._tool_limits = start_sandbox, tool_limits
        self._tools = self._make_tools()
        self._state = "new"

    @property
    def task(self) -> Task:
        return self._task

    def reset(self) -> Observation:
        self._tools.workspace.close()
        self._tools = self._make_tools()
        self._state = "running"
        return Observation(self._task.issue)

    def step(self, action: str) -> Observation:
        if self._state != "running":
            raise EpisodeError(
                f"step on an episode that is {self._state}: got={action[:80]!r}"
                " expected reset() first"
            )
        spoken = self._grammar.read(action, self._tools)
        results: list[ToolResult] = []
        for call in spoken.calls:
            results.append(self._tools.run(call))
            if isinstance(results[-1], Submitted):
                self._state = "over"
                break
        over = self._state == "over"
        return Observation(
            spoken.reply(results),
            done=over,
            stop_reason="submit" if over else "",
            malformed=all(isinstance(call, CallError) for call in spoken.calls),
        )

    def patch(self) -> bytes:
        return diff_trees(self._task.files, self._tools.workspace.snapshot()).patch

    def grade(self) -> Score:
        try:
            patch = self.patch()
        except InfrastructureError as error:
            return Score(None, "infrastructure", str(error))
        except WorkspaceError as error:
            return Score(0.0, "graded", f"the work tree cannot be read: {error}")
        return grade(self._task, patch, self._runner)

    def close(self) -> None:
        self._tools.workspace.close()
        self._state = "closed"

    def _make_tools(self) -> WorkspaceTools:
        workspace = Workspace(self._task.files, self._start_sandbox)
        return WorkspaceTools(self._task, workspace, self._runner, self._tool_limits)
