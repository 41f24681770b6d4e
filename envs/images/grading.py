"""Grading a patch in a fresh container of the task's own image.

Nothing that the agent did reaches this container but the source part of its patch. The official
tests run as the image has them; outcomes come over a channel of their own; a run that would earn
the reward is repeated with wrong expectations, which honest code must fail.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from envs.base import Score
from envs.errors import InfrastructureError, PatchError, TaskError, TaskTimeoutError
from envs.grading import control
from envs.images import audit, outcomes
from envs.images.official_tests import (
    SETUP_TIMEOUT_S,
    TestRun,
    apply_sections,
    grading_container,
    run_tests,
    turn_tests_wrong,
)
from envs.images.sections import Section, split_patch
from envs.images.task import ImageTask
from envs.sandbox.docker.docker_sandbox import DockerSandbox
from envs.sandbox.docker.host import DockerHost
from envs.sandbox.docker.options import DockerOptions


@dataclass(frozen=True)
class GradingPolicy:
    """The strictness of training rewards.

    ``refuse_suspicious`` withholds the reward from patches that use means no fix needs; they are
    reported either way. ``control_run`` repeats a passing run with wrong expectations.
    """

    refuse_suspicious: bool = True
    control_run: bool = True


@dataclass(frozen=True)
class Validation:
    """Findings from a task's gold patch: means it needs, tests that can be turned wrong."""

    gold_means: frozenset[str] = frozenset()  # suspicious means that the solution itself uses
    controls: frozenset[str] | None = None  # tests that fail the control run; None: not measured
    failing: frozenset[str] = frozenset()  # expected passes that the base commit does not give


class ImageGrader:
    """A judge of patches for image tasks. Thread-safe: every call has containers of its own."""

    def __init__(
        self, host: DockerHost, options: DockerOptions, policy: GradingPolicy | None = None
    ) -> None:
        self._host = host
        self._options = replace(options, network="none")
        self._policy = policy or GradingPolicy()

    def grade(self, task: ImageTask, patch: bytes, validation: Validation | None = None) -> Score:
        """Judge ``patch``. Never raises for infrastructure trouble, see ``Score.status``."""
        try:
            return self._grade(task, patch, validation or Validation())
        except PatchError as error:
            return Score(0.0, "graded", f"patch: {error}")
        except InfrastructureError as error:
            return Score(None, "infrastructure", str(error))

    def _grade(self, task: ImageTask, patch: bytes, validation: Validation) -> Score:
        if not patch:
            return Score(0.0, "graded", "empty patch")
        sections = split_patch(patch)
        with self._container(task) as sandbox:
            guarded = audit.protected_paths(sections, task.protected, _top_level(sandbox, task))
            kept = [section for section in sections if section.path not in guarded]
            means = audit.suspicious_means(kept, validation.gold_means)
            touched = (*guarded, *(f"suspicious {entry}" for entry in means))
            if not kept:
                reason = "the patch changes protected files only"
                return Score(0.0, "graded", reason, protected_touched=touched)
            apply_sections(sandbox, task, kept)
            run = run_tests(sandbox, task.plan)
        score = replace(_score(task, run), protected_touched=touched)
        if score.reward and means and self._policy.refuse_suspicious:
            return replace(score, reward=0.0, reason=f"refused: {means[0]}")
        if score.reward and self._policy.control_run and task.plan.plugin:
            forged = self._forged(task, kept, validation)
            if forged:
                reason = f"refused: passes tests with wrong expectations: {forged[:3]}"
                return replace(score, reward=0.0, reason=reason)
        return score

    def _forged(
        self, task: ImageTask, sections: Sequence[Section], validation: Validation
    ) -> list[str]:
        """Return the tests that pass although what they expect is wrong."""
        rng = random.Random(secrets.randbits(64))
        # What has to be forged is what fails without the fix: always among the turned tests.
        failing = frozenset(map(control.function_of, validation.failing))
        choose = control.draw_choice(rng, failing) if failing else None
        passed = self.control_passes(task, sections, choose)
        if validation.controls is None:
            return sorted(passed)
        return sorted(passed & validation.controls)

    def control_passes(
        self,
        task: ImageTask,
        sections: Sequence[Section],
        choose: control.Choose | None = None,
        *,
        in_time: bool = False,
    ) -> frozenset[str]:
        """Return the names of expected passes that pass the control run as well.

        With ``in_time`` a run that did not end raises TaskTimeoutError: what it did not come to
        has not failed.
        """
        with self._container(task) as sandbox:
            apply_sections(sandbox, task, sections)
            turned = turn_tests_wrong(sandbox, task.plan, choose)
            run = run_tests(sandbox, task.plan)
        if in_time:
            _in_time(task, run)
        statuses = outcomes.rename(run.outcomes.statuses, task.plan.names)
        return frozenset(
            name
            for name, wanted in task.expected.items()
            if wanted == "PASSED"
            and statuses.get(name) == "PASSED"
            and control.function_of(name) in turned
        )

    def _container(self, task: ImageTask) -> AbstractContextManager[DockerSandbox]:
        return grading_container(self._host, task, self._options)

    def check(self, task: ImageTask) -> Validation:
        """Show that the task can be used: gold earns the reward, the base commit does not.

        Raises TaskError saying which of it fails, TaskTimeoutError, InfrastructureError.
        """
        sections = split_patch(task.solution) if task.solution else []
        if not sections:
            raise TaskError(f"task {task.task_id} has no solution to validate it with")
        means = audit.reasons_of(audit.suspicious_means(sections))
        with self._container(task) as sandbox:
            run = _in_time(task, run_tests(sandbox, task.plan))
        base = _score(task, run)
        if base.reward == 1.0:
            raise TaskError(f"task {task.task_id} is solved as it stands: expected=a failing test")
        with self._container(task) as sandbox:
            apply_sections(sandbox, task, sections)
            gold = _score(task, _in_time(task, run_tests(sandbox, task.plan)))
        if gold.reward != 1.0:
            raise TaskError(f"the gold patch of {task.task_id} fails: got={gold.reason}")
        passes = {name for name, wanted in task.expected.items() if wanted == "PASSED"}
        controls = None
        if self._policy.control_run and task.plan.plugin:
            controls = frozenset(passes - self.control_passes(task, sections, in_time=True))
        statuses = outcomes.rename(run.outcomes.statuses, task.plan.names)
        failing = frozenset(name for name in passes if statuses.get(name) != "PASSED")
        return Validation(frozenset(means), controls, failing)


def _in_time(task: ImageTask, run: TestRun) -> TestRun:
    if run.result.timed_out:
        raise TaskTimeoutError(
            f"the tests of {task.task_id} ran into their time limit: got more than"
            f" {task.plan.timeout_s:g} s; the machine is too busy or too slow for them"
        )
    return run


def _score(task: ImageTask, run: TestRun) -> Score:
    statuses = outcomes.rename(run.outcomes.statuses, task.plan.names)
    expected = outcomes.normal_expected(task.expected)
    right = sum(statuses.get(name) == wanted for name, wanted in expected.items())
    wrong = len(expected) - right
    problems: list[str] = []
    if run.result.timed_out:
        problems.append("the tests ran into their time limit")
    if not run.outcomes.complete:
        problems.append(run.outcomes.reason)
    if run.tests_changed:
        problems.append("test files were changed while they ran")
    if wrong:
        problems.append(f"{wrong} of {len(expected)} tests not as expected")
    if not expected:
        problems.append("the task expects no test")
    if task.exact and (extra := outcomes.unexpected(statuses, expected)):
        problems.append(f"tests nobody asked for: {extra[:5]}")
    return Score(
        float(not problems),
        "graded",
        "; ".join(problems) or "all tests as expected",
        right,
        wrong,
        test_log=run.result.output,
    )


def _top_level(sandbox: DockerSandbox, task: ImageTask) -> frozenset[str]:
    result = sandbox.exec(["ls", "-A1", "--", task.repository], timeout_s=SETUP_TIMEOUT_S)
    return frozenset(result.output.decode("utf-8", "surrogateescape").split("\n"))
