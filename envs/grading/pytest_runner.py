"""Test files of any kind, run by pytest in a fresh sandbox.

The code under test shares pytest's process, so a determined one can forge what pytest reports;
:mod:`envs.grading.case_runner` has no such hole and is to be preferred wherever tests are in case
form.
What this runner does refuse: an early ``os._exit``, a report that contradicts itself or the exit
status, names that nobody asked for, and anything printed that only looks like a summary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs.base import ExecResult
from envs.grading.suite import Failure, FailureKind, SuiteReport, TestStatus
from envs.sandbox.guest.exec_job import REPORT_FD
from envs.sandbox.jobs_client import exec_job, exec_result
from envs.sandbox.pool import SandboxPool

_PLUGIN = "suite_report_plugin"
_NORMAL_EXITS = (0, 1)  # all passed; some failed
_BAD: tuple[TestStatus, ...] = ("FAILED", "ERROR")


class PytestRunner:
    """Runs whole files with ``python -m pytest``; the pool must show installed packages.

    Example:
        >>> pool = SandboxPool(SandboxSpec("bubblewrap", site_packages=True), num_workers=2)
        >>> report = PytestRunner(pool).run({"a.py": source}, {"tests/test_a.py": tests})
    """

    def __init__(
        self,
        pool: SandboxPool,
        *,
        timeout_s: float = 60.0,
        output_cap_bytes: int = 256 << 10,
        options: Sequence[str] = (),
        import_folders: Sequence[str] = (),
    ) -> None:
        """``options`` go to pytest; ``import_folders`` of the tree go to the import path.

        Installed pytest plugins stay out (loading them takes longer than a small suite); name
        those that a suite needs, as in ``options=("-p", "anyio")``.
        """
        self._pool = pool
        self._timeout_s, self._cap = timeout_s, output_cap_bytes
        self._options, self._import_folders = tuple(options), tuple(import_folders)

    def run(self, files: Mapping[str, bytes], test_files: Mapping[str, bytes]) -> SuiteReport:
        """All test files in one sandbox. Raises InfrastructureError."""
        argv = ["python", "-m", "pytest", "-p", _PLUGIN, "-p", "no:cacheprovider"]
        argv += ["--color=no", "-q", "--rootdir=.", *self._options, "--", *test_files]
        import_path = ":".join((self._pool.plugin_folder, *self._import_folders))
        request, body = exec_job(
            argv,
            timeout_s=self._timeout_s,
            output_cap_bytes=self._cap,
            env={
                "SUITE_REPORT_FD": str(REPORT_FD),
                "PYTHONPATH": import_path,
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            },
            files={**files, **test_files},
            fresh=True,
            wants_report=True,
        )
        return read_suite(exec_result(*self._pool.run(request, body)))


@dataclass(frozen=True)
class _Records:
    """The plugin's lines: outcomes by (name, phase), the exit status, and whether all fit."""

    outcomes: dict[tuple[str, str], tuple[str, bool]]
    finish: int | None
    sound: bool


def read_suite(result: ExecResult) -> SuiteReport:
    """Statuses from the plugin's report; incomplete when report and exit status disagree."""
    records = _read_records(result.report)
    statuses: dict[str, TestStatus] = {}
    for (name, when), (outcome, xfail) in records.outcomes.items():
        status = _status(when, outcome, xfail)
        if status and statuses.get(name) not in _BAD:
            statuses[name] = status
    bad = [name for name, status in statuses.items() if status in _BAD]
    complete = (
        records.sound
        and records.finish == result.exit_code
        and result.exit_code in _NORMAL_EXITS
        and (result.exit_code == 0) == (not bad)
    )
    failure = None
    if bad or not complete:
        late = result.timed_out or result.cpu_exceeded
        kind: FailureKind = "failed" if complete else "timeout" if late else "crash"
        failure = Failure(bad[0] if bad else "", kind)
    return SuiteReport(statuses, failure, complete, result.output)


def _read_records(report: bytes) -> _Records:
    outcomes: dict[tuple[str, str], tuple[str, bool]] = {}
    finish: int | None = None
    *lines, rest = report.split(b"\n")
    sound = not rest
    for line in lines:
        try:
            record: dict[str, Any] = json.loads(line)
            if "finish" in record:
                sound &= finish is None
                finish = int(record["finish"])
                continue
            key = (str(record["id"]), str(record["when"]))
            value = (str(record["outcome"]), bool(record["xfail"]))
        except (ValueError, TypeError, KeyError, RecursionError):
            sound = False
            continue
        sound &= key not in outcomes and finish is None
        outcomes[key] = value
    return _Records(outcomes, finish, sound)


def _status(when: str, outcome: str, xfail: bool) -> TestStatus | None:
    """The status that one phase gives a test, None where the phase says nothing."""
    if outcome == "failed":
        return "FAILED" if when == "call" else "ERROR"
    if outcome == "skipped":
        return "XFAIL" if xfail else "SKIPPED"
    if when != "call":
        return None
    return "XPASS" if xfail else "PASSED"
