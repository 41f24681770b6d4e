"""From a patch to a score, in a fresh container of the task's own image.

Nothing that the agent did reaches this container but the source part of its patch. The official
tests run as the image has them; outcomes come over a channel of their own; a run that would earn
the reward is repeated with wrong expectations, which honest code must fail.
"""

from __future__ import annotations

import hashlib
import posixpath
import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from envs.base import ExecResult, Score
from envs.errors import InfrastructureError, PatchError, TaskError, TaskTimeoutError
from envs.grading import control
from envs.grading.plugin_report import PLUGIN, TARGET_VARIABLE, Outcomes, read_report
from envs.images import audit, outcomes
from envs.images.sections import Section, split_patch
from envs.images.task import ImageTask, TestPlan
from envs.sandbox.docker.docker_errors import ArchiveTooLargeError
from envs.sandbox.docker.docker_sandbox import DockerSandbox
from envs.sandbox.docker.host import DockerHost
from envs.sandbox.docker.options import DockerOptions
from envs.sandbox.launch import GUEST_FOLDER

_SETUP_TIMEOUT_S = 120.0
_LOG_CAP_BYTES = 1 << 20
_REPORT_CAP_BYTES = 16 << 20
_PLUGIN_FILE = GUEST_FOLDER / "plugin" / f"{PLUGIN}.py"
_PYTHON_CACHE = ("__pycache__", ".pytest_cache")


@dataclass(frozen=True)
class GradingPolicy:
    """How strict training rewards are.

    ``refuse_suspicious`` withholds the reward from patches that use means no fix needs; they are
    reported either way. ``control_run`` repeats a passing run with wrong expectations.
    """

    refuse_suspicious: bool = True
    control_run: bool = True


@dataclass(frozen=True)
class Validation:
    """What the gold patch showed of a task: what it needs, and which tests can be turned wrong."""

    gold_means: frozenset[str] = frozenset()  # suspicious means that the solution itself uses
    controls: frozenset[str] | None = None  # tests that fail the control run; None: not measured
    failing: frozenset[str] = frozenset()  # expected passes that the base commit does not give


@dataclass(frozen=True)
class TestRun:
    """One run of the official tests."""

    __test__ = False

    result: ExecResult
    outcomes: Outcomes
    tests_changed: bool


class ImageGrader:
    """Judges patches for image tasks. Thread-safe: every call has containers of its own."""

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
        with self.container(task) as sandbox:
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
        """Tests that pass although what they expect is wrong."""
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
        """Names of expected passes that pass the control run as well.

        With ``in_time`` a run that did not end raises TaskTimeoutError: what it did not come to
        has not failed.
        """
        with self.container(task) as sandbox:
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

    def container(self, task: ImageTask) -> _Container:
        """A fresh container of the task's own image, with the official test files in place."""
        options = replace(self._options, workspace=task.repository)
        return _Container(self._host, task, options)

    def check(self, task: ImageTask) -> Validation:
        """Show that the task can be used: gold earns the reward, the base commit does not.

        Raises TaskError saying which of it fails, TaskTimeoutError, InfrastructureError.
        """
        sections = split_patch(task.solution) if task.solution else []
        if not sections:
            raise TaskError(f"task {task.task_id} has no solution to validate it with")
        means = audit.reasons_of(audit.suspicious_means(sections))
        with self.container(task) as sandbox:
            run = _in_time(task, run_tests(sandbox, task.plan))
        base = _score(task, run)
        if base.reward == 1.0:
            raise TaskError(f"task {task.task_id} is solved as it stands: expected=a failing test")
        with self.container(task) as sandbox:
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


class _Container:
    """A grading container as a context."""

    def __init__(self, host: DockerHost, task: ImageTask, options: DockerOptions) -> None:
        self._host, self._task, self._options = host, task, options

    def __enter__(self) -> DockerSandbox:
        self._sandbox = DockerSandbox.start(self._host, self._task.image, self._options)
        try:
            place_tests(self._sandbox, self._task.plan)
        except BaseException:
            self._sandbox.close()
            raise
        return self._sandbox

    def __exit__(self, *_: object) -> None:
        self._sandbox.close()


def apply_sections(sandbox: DockerSandbox, task: ImageTask, sections: Sequence[Section]) -> None:
    """Apply parts of a patch to the work tree. Raises PatchError when they do not fit."""
    argv = ["git", "apply", "--whitespace=nowarn", "-"]
    patch = b"".join(section.data for section in sections)
    env = {
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CEILING_DIRECTORIES": posixpath.dirname(task.repository),
    }
    result = sandbox.exec(argv, timeout_s=_SETUP_TIMEOUT_S, stdin=patch, env=env)
    if result.exit_code != 0:
        raise PatchError(f"it does not apply: {result.output[-300:].decode(errors='replace')}")


def place_tests(sandbox: DockerSandbox, plan: TestPlan) -> None:
    """Put official test files and links where the plan wants them."""
    for path in plan.files:
        _must(sandbox, ["mkdir", "-p", "--", posixpath.dirname(path)])
    if plan.files:
        sandbox.put_files("/", {path.lstrip("/"): data for path, data in plan.files.items()})
    for link, target in plan.links.items():
        _must(sandbox, ["ln", "-sfn", "--", target, link])


def run_tests(sandbox: DockerSandbox, plan: TestPlan) -> TestRun:
    """Run the plan's command once; what it leaves running is killed before its report is read."""
    before = _digest_tests(sandbox, plan)
    nonce = secrets.token_hex(16)
    folder = f"/tmp/.{secrets.token_hex(8)}"
    report = f"{folder}/{nonce}"
    env = dict(plan.environment)
    if plan.plugin:
        _must(sandbox, ["mkdir", "-p", folder])
        sandbox.put_files(folder, {_PLUGIN_FILE.name: _PLUGIN_FILE.read_bytes()})
        env |= {
            TARGET_VARIABLE: report,
            "PYTEST_ADDOPTS": f"-p {PLUGIN} -p no:cacheprovider",
            "PYTHONPATH": folder,
        }
    result = sandbox.exec_trusted(
        plan.command, timeout_s=plan.timeout_s, output_cap_bytes=_LOG_CAP_BYTES, env=env
    )
    changed = _has_changed(sandbox, plan, before)
    if not plan.plugin:
        return TestRun(result, outcomes.read_printed(result.output, result.exit_code), changed)
    try:
        written = sandbox.get_files(report, _REPORT_CAP_BYTES).get(nonce, b"")
    except (FileNotFoundError, ArchiveTooLargeError):
        written = b""  # a report that the tests removed or flooded is none
    return TestRun(result, read_report(written, nonce, result.exit_code), changed)


def _in_time(task: ImageTask, run: TestRun) -> TestRun:
    if run.result.timed_out:
        raise TaskTimeoutError(
            f"the tests of {task.task_id} ran into their time limit: got more than"
            f" {task.plan.timeout_s:g} s; the machine is too busy or too slow for them"
        )
    return run


def turn_tests_wrong(
    sandbox: DockerSandbox, plan: TestPlan, choose: control.Choose | None = None
) -> frozenset[str]:
    """Rewrite official test modules in place, see ``control``. Returns what was turned.

    When the choice hits no test at all, every test is turned.
    """
    rng = random.Random(secrets.randbits(64))
    turned: set[str] = set()
    for root in plan.judged_paths:
        modules = {
            name: control.turn_wrong(data, rng, choose)
            for name, data in _test_files(sandbox, root).items()
            if name.endswith(".py") and posixpath.basename(name) != "conftest.py"
        }
        rewritten = {name: module.source for name, module in modules.items() if module.turned}
        sandbox.put_files(posixpath.dirname(root), rewritten)
        turned.update(*(module.turned for module in modules.values()))
    if choose is not None and not turned:
        return turn_tests_wrong(sandbox, plan)
    return frozenset(turned)


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


def _has_changed(sandbox: DockerSandbox, plan: TestPlan, before: str) -> bool:
    """Whether the tests are others than before they ran. What code under test did to them, by
    removing or flooding them too, is its own doing: as infrastructure trouble it would let an
    agent choose which episodes count."""
    try:
        return _digest_tests(sandbox, plan) != before
    except (TaskError, ArchiveTooLargeError):
        return True


def _digest_tests(sandbox: DockerSandbox, plan: TestPlan) -> str:
    digest = hashlib.sha256()
    for root in plan.judged_paths:
        for name, data in sorted(_test_files(sandbox, root).items()):
            digest.update(f"{name} {len(data)} ".encode("utf-8", "surrogateescape") + data)
    return digest.hexdigest()


def _test_files(sandbox: DockerSandbox, root: str) -> Mapping[str, bytes]:
    try:
        files = sandbox.get_files(root)
    except FileNotFoundError as error:
        raise TaskError(f"the image lacks its tests: got no {root}") from error
    return {
        name: data
        for name, data in files.items()
        if not any(part in _PYTHON_CACHE for part in name.split("/"))
    }


def _top_level(sandbox: DockerSandbox, task: ImageTask) -> frozenset[str]:
    result = sandbox.exec(["ls", "-A1", "--", task.repository], timeout_s=_SETUP_TIMEOUT_S)
    return frozenset(result.output.decode("utf-8", "surrogateescape").split("\n"))


def _must(sandbox: DockerSandbox, argv: Sequence[str]) -> None:
    result = sandbox.exec(argv, timeout_s=_SETUP_TIMEOUT_S)
    if result.exit_code != 0:
        raise InfrastructureError(
            f"the grading container cannot be set up: got={result.output[-300:]!r} for {argv[0]}"
        )
