"""Reports of test runs, whoever ran them, and the protocol of what runs tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

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
        """True where at least one test ran and nothing went wrong."""
        return self.complete and bool(self.statuses) and self.failure is None


class SuiteRunner(Protocol):
    """A runner of tests against a source tree, each time in a fresh sandbox."""

    def run(self, files: Mapping[str, bytes], test_files: Mapping[str, bytes]) -> SuiteReport:
        """Run ``test_files`` on ``files``, the tree without them.

        Raises TaskError, InfrastructureError.
        """
        ...
