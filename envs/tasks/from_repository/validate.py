"""Validation of bugs: the repository's own tests decide whether one makes a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from envs.errors import TaskError
from envs.grading.suite import SuiteReport, SuiteRunner, TestStatus
from envs.tasks.from_repository.candidates import Candidate
from envs.tasks.from_repository.repository import Repository

Refusal = Literal[
    "no_test_fails",  # no test notices the bug
    "too_many_fail",  # the bug breaks everything; there is nothing to find
    "hangs",
    "run_broke_off",  # the test process ended early, or a test file cannot be imported
    "other_tests",  # tests vanished, appeared or changed to a status that is neither good nor bad
    "fix_does_not_restore",  # the failure is not the bug's: a flaky test
    "alike",  # the same tests of the same function are already a task
]
_GOOD: frozenset[TestStatus] = frozenset({"PASSED", "SKIPPED", "XFAIL"})
_BAD: frozenset[TestStatus] = frozenset({"FAILED", "ERROR"})


@dataclass(frozen=True)
class Baseline:
    """The ends of the correct tree's tests. ``left_out``: test files that are not used, and why."""

    statuses: Mapping[str, TestStatus]
    test_files: tuple[str, ...]
    left_out: Mapping[str, str]


@dataclass(frozen=True)
class Verdict:
    """The verdict on a bug.

    ``failing`` are the tests that it breaks, in running order, where it makes a task."""

    refusal: Refusal | None
    failing: tuple[str, ...] = ()
    log: bytes = b""


class Validator:
    """A judge of bugs by the tests of one repository, each time in a fresh sandbox."""

    def __init__(
        self, repository: Repository, runner: SuiteRunner, max_failing_share: float = 0.5
    ) -> None:
        """Run the correct tree twice. Raises TaskError when too little of it works."""
        self._repository, self._runner = repository, runner
        self._max_failing_share = max_failing_share
        self.baseline = self._measure()

    def check(self, candidate: Candidate) -> Verdict:
        """Run the tests with the bug, then the failing ones with its fix.

        Raises InfrastructureError."""
        report = self._run(self.baseline.test_files, {candidate.path: candidate.content})
        if report.failure is not None and report.failure.kind == "timeout":
            return Verdict("hangs")
        wanted = self.baseline.statuses
        failing = tuple(n for n, status in report.statuses.items() if status in _BAD)
        if not report.complete:
            return Verdict("run_broke_off")
        if set(report.statuses) != set(wanted) or any(
            s not in _BAD and s != wanted[n] for n, s in report.statuses.items()
        ):
            return Verdict("other_tests")
        if not failing:
            return Verdict("no_test_fails")
        if len(failing) > max(3, self._max_failing_share * len(wanted)):
            return Verdict("too_many_fail")
        fixed = self._run(sorted({name.partition("::")[0] for name in failing}), {})
        if any(fixed.statuses.get(name) != wanted[name] for name in failing):
            return Verdict("fix_does_not_restore")
        return Verdict(None, failing, report.log)

    def _measure(self) -> Baseline:
        """Find the test files whose every test ends well, twice the same way."""
        names = self._repository.test_files
        first, second = self._run(names, {}), self._run(names, {})
        if not first.statuses:
            shown = first.log[-1500:].decode("utf-8", "replace")
            raise TaskError(
                f"the tests of {self._repository.name} do not run as they are; expected tests that"
                f" pass with the installed packages, got:\n{shown}"
            )
        left_out: dict[str, str] = {}
        for path in names:
            found = _of_file(first, path)
            if not found:
                left_out[path] = "no test of it ran"
            elif found != _of_file(second, path):
                left_out[path] = "two runs differ"
            elif bad := [n for n, status in found.items() if status not in _GOOD]:
                left_out[path] = f"{len(bad)} tests do not pass, first {bad[0]}"
        kept = tuple(path for path in names if path not in left_out)
        statuses: dict[str, TestStatus] = {}
        for path in kept:
            statuses |= _of_file(first, path)
        if not any(status == "PASSED" for status in statuses.values()):
            raise TaskError(
                f"no test file of {self._repository.name} can be used: got={left_out}"
                " expected one whose tests all pass"
            )
        return Baseline(statuses, kept, left_out)

    def _run(self, tests: Sequence[str], changed: Mapping[str, bytes]) -> SuiteReport:
        files = {**self._repository.files, **changed}
        return self._runner.run(files, {path: files.pop(path) for path in tests})


def _of_file(report: SuiteReport, path: str) -> dict[str, TestStatus]:
    prefix = f"{path}::"
    return {name: status for name, status in report.statuses.items() if name.startswith(prefix)}
