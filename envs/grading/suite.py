"""What a test run says, whoever ran it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from envs.base import Task
from envs.errors import TaskError

DEFAULT_RUNNER = "cases"
TestStatus = Literal["PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS"]
FailureKind = Literal["mismatch", "exception", "timeout", "crash", "failed"]


@dataclass(frozen=True)
class Failure:
    """The first test that did not pass, in the order of the files."""

    test: str
    kind: FailureKind
    call: str = ""
    got: str = ""  # mismatch: the value; exception: its name
    want: str = ""


@dataclass(frozen=True)
class SuiteReport:
    """Statuses by full test name (``tests/test_a.py::test_1``), in running order."""

    statuses: Mapping[str, TestStatus]
    failure: Failure | None = None
    complete: bool = True  # False: the run broke off, and its statuses decide nothing
    log: bytes = field(default=b"", repr=False)

    @property
    def passed(self) -> bool:
        """Whether at least one test ran and nothing went wrong."""
        return self.complete and bool(self.statuses) and self.failure is None


class SuiteRunner(Protocol):
    """Runs tests against a source tree, each time in a fresh sandbox."""

    def run(self, files: Mapping[str, bytes], test_files: Mapping[str, bytes]) -> SuiteReport:
        """``files`` is the tree without the tests. Raises TaskError, InfrastructureError."""
        ...


def runner_for(task: Task, runners: Mapping[str, SuiteRunner]) -> SuiteRunner:
    """The runner that the task's ``metadata["test_runner"]`` names; ``cases`` if it names none.

    Raises TaskError when it is not among ``runners``.
    """
    name = task.metadata.get("test_runner", DEFAULT_RUNNER)
    if name not in runners:
        raise TaskError(
            f"task {task.task_id} wants another test runner: got={name!r} expected one of"
            f" {sorted(runners)}"
        )
    return runners[name]
