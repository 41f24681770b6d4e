"""One episode on an image task; implements the ``Env`` protocol."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from envs.actions.calls import CallError, ToolCall, ToolSpec
from envs.actions.container_tools import ContainerTools, ToolSettings
from envs.actions.grammars.action_format import ActionFormat, answer
from envs.base import Observation, Score
from envs.errors import EpisodeError, PatchError
from envs.images.grading import ImageGrader, Validation
from envs.images.prepare import ImagePreparer, PreparedImage
from envs.images.task import ImageTask
from envs.patches.git_patch import ExtractedPatch, PatchLimits, extract_patch
from envs.sandbox.docker.docker_sandbox import DockerSandbox
from envs.sandbox.docker.host import DockerHost
from envs.sandbox.docker.options import DockerOptions

log = logging.getLogger(__name__)
_END_TOOLS = frozenset({"finish", "submit"})


@dataclass(frozen=True)
class ImageEnvParts:
    """Parts that every episode of a run shares."""

    host: DockerHost
    options: DockerOptions
    preparer: ImagePreparer
    grader: ImageGrader
    action_format: ActionFormat
    tools: Sequence[ToolSpec]
    tool_settings: ToolSettings = field(default_factory=ToolSettings)
    patch_limits: PatchLimits = field(default_factory=PatchLimits)


class ImageEnv:
    """An episode in a container of the prepared image; the patch is graded in a fresh one.

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
        self._tools: ContainerTools | None = None
        self._patch: ExtractedPatch | None = None
        self._state: str = "new"

    @property
    def task(self) -> ImageTask:
        return self._task

    def reset(self) -> Observation:
        """Start over in a fresh container. Raises InfrastructureError, HistoryLeakError."""
        self._close_sandbox()
        parts = self._parts
        self._prepared = parts.preparer.prepare(self._task)
        options = replace(parts.options, workspace=self._task.repository)
        self._sandbox = DockerSandbox.start(parts.host, self._prepared.name, options)
        self._tools = ContainerTools(self._sandbox, parts.tool_settings)
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
        replies: list[str] = []
        over = False
        for call in parsed.calls:
            over = isinstance(call, ToolCall) and call.name in _END_TOOLS
            replies.append("submitted" if over else _carry_out(call, self._tools))
            if over:
                self._state = "over"
                break
        return Observation(
            answer(self._parts.action_format, parsed, replies),
            done=over,
            stop_reason="submit" if over else "",
            malformed=parsed.malformed,
        )

    def patch(self) -> bytes:
        """Return the diff to the work tree the agent got; empty when the agent destroyed it."""
        return self.extract().data

    def extract(self) -> ExtractedPatch:
        """Take the patch, once, with notes on what was left out; the episode is over then."""
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


def _carry_out(call: ToolCall | CallError, tools: ContainerTools) -> str:
    return f"ERROR: {call.message}" if isinstance(call, CallError) else tools.run(call)


def issue_text(problem_statement: str) -> str:
    """Return the part between ``[ISSUE]`` and ``[/ISSUE]``, or all of it."""
    match = re.search(r"\[ISSUE\](.*)\[/ISSUE\]", problem_statement, re.DOTALL)
    return (match.group(1) if match else problem_statement).strip()
