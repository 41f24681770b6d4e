"""One episode on an image task; implements the ``Env`` protocol."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from envs.actions.base import ActionFormat, CallError, ToolCall, ToolSpec
from envs.actions.observation import unicode_only
from envs.base import Observation, Score
from envs.errors import EpisodeError, PatchError
from envs.images.grading import ImageGrader, Validation
from envs.images.prepare import ImagePreparer, PreparedImage
from envs.images.task import ImageTask
from envs.images.tools import ImageTools, ToolSettings
from envs.patches.git_patch import ExtractedPatch, PatchLimits, extract_patch
from envs.sandbox.docker.host import DockerHost
from envs.sandbox.docker.options import DockerOptions
from envs.sandbox.docker.sandbox import DockerSandbox

log = logging.getLogger(__name__)
_END_TOOLS = frozenset({"finish", "submit"})


@dataclass(frozen=True)
class ImageEnvParts:
    """What every episode of a run shares."""

    host: DockerHost
    options: DockerOptions
    preparer: ImagePreparer
    grader: ImageGrader
    action_format: ActionFormat
    tools: Sequence[ToolSpec]
    tool_settings: ToolSettings = field(default_factory=ToolSettings)
    patch_limits: PatchLimits = field(default_factory=PatchLimits)


class ImageEnv:
    """The agent works in a container of the prepared image; its patch is graded in a fresh one.

    Example:
        >>> env = ImageEnv(task, parts)
        >>> env.reset().text
        'mean([]) raises ZeroDivisionError; it should return 0.0'
        >>> env.step("<function=execute_bash><parameter=cmd>ls</parameter></function>").done
        False
    """

    def __init__(
        self, task: ImageTask, parts: ImageEnvParts, validation: Validation | None = None
    ) -> None:
        self._task, self._parts, self._validation = task, parts, validation
        self._prepared: PreparedImage | None = None
        self._sandbox: DockerSandbox | None = None
        self._tools: ImageTools | None = None
        self._patch: ExtractedPatch | None = None
        self._state: str = "new"

    @property
    def task(self) -> ImageTask:
        return self._task

    def reset(self) -> Observation:
        """A fresh container. Raises InfrastructureError, HistoryLeakError."""
        self._close_sandbox()
        parts = self._parts
        self._prepared = parts.preparer.prepare(self._task)
        options = replace(parts.options, workspace=self._task.repository)
        self._sandbox = DockerSandbox.start(parts.host, self._prepared.name, options)
        self._tools = ImageTools(self._sandbox, parts.tool_settings)
        self._patch = None
        self._state = "running"
        return Observation(self._task.issue)

    def step(self, action: str) -> Observation:
        if self._state != "running" or self._tools is None:
            raise EpisodeError(
                f"step on an episode that is {self._state}: got={action[:80]!r}"
                " expected reset() first"
            )
        parsed = self._parts.action_format.parse(action, self._parts.tools)
        replies = [self._reply(call) for call in parsed.calls]
        over = self._is_over()
        return Observation(
            unicode_only(self._parts.action_format.results(parsed, replies)),
            done=over,
            stop_reason="submit" if over else "",
            malformed=parsed.malformed,
        )

    def _is_over(self) -> bool:
        return self._state == "over"

    def _reply(self, call: ToolCall | CallError) -> str:
        if self._is_over():
            return "not run: the episode is over"
        if isinstance(call, CallError):
            return f"ERROR: {call.message}"
        if call.name in _END_TOOLS:
            self._state = "over"
            return "submitted"
        assert self._tools is not None
        return self._tools.run(call)

    def patch(self) -> bytes:
        """The difference to the work tree the agent got; empty when the agent destroyed it."""
        return self.extract().data

    def extract(self) -> ExtractedPatch:
        """The patch with notes on what was left out. Taken once: the episode is over then."""
        if self._patch is None:
            if self._sandbox is None or self._prepared is None:
                raise EpisodeError("there is no work tree: got=patch() expected=reset() first")
            try:
                self._patch = extract_patch(
                    self._sandbox, self._prepared.baseline, self._parts.patch_limits
                )
            except PatchError as error:
                log.info("no patch of %s: %s", self._task.task_id, error)
                self._patch = ExtractedPatch(b"", notes=(str(error),))
            self._state = "over"
        return self._patch

    def grade(self) -> Score:
        extracted = self.extract()
        self._close_sandbox()
        score = self._parts.grader.grade(self._task, extracted.data, self._validation)
        if extracted.notes and score.reward == 0.0:
            score = replace(
                score, reason=f"{score.reason}; left out: {'; '.join(extracted.notes[:5])}"
            )
        return score

    def close(self) -> None:
        self._close_sandbox()
        self._state = "closed"

    def _close_sandbox(self) -> None:
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None


def issue_text(problem_statement: str) -> str:
    """The part between ``[ISSUE]`` and ``[/ISSUE]``, or all of it."""
    match = re.search(r"\[ISSUE\](.*)\[/ISSUE\]", problem_statement, re.DOTALL)
    return (match.group(1) if match else problem_statement).strip()
