"""Test files of any kind, run by pytest in a fresh sandbox.

The code under test shares pytest's process, so a determined one can forge what pytest reports;
:mod:`envs.grading.case_runner` has no such hole and is to be preferred wherever tests are in case
form. This runner refuses an early ``os._exit``, a report that contradicts itself or the exit
status, names that nobody asked for, and anything printed that only looks like a summary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from envs.base import ExecResult
from envs.grading.plugin_report import BAD, PLUGIN, TARGET_VARIABLE, read_report
from envs.grading.suite import Failure, FailureKind, SuiteReport
from envs.sandbox.guest.exec_job import REPORT_FD
from envs.sandbox.jobs_client import exec_job, exec_result
from envs.sandbox.pool import SandboxPool


class PytestRunner:
    """A runner of whole files by ``python -m pytest``; the pool must show installed packages.

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
        """Set up: ``options`` go to pytest, ``import_folders`` of the tree to the import path.

        Installed pytest plugins stay out (loading them takes longer than a small suite); name
        those that a suite needs, as in ``options=("-p", "anyio")``.
        """
        self._pool = pool
        self._timeout_s, self._cap = timeout_s, output_cap_bytes
        self._options, self._import_folders = tuple(options), tuple(import_folders)

    def run(self, files: Mapping[str, bytes], test_files: Mapping[str, bytes]) -> SuiteReport:
        """Run all test files in one sandbox. Raises InfrastructureError."""
        argv = ["python", "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider"]
        argv += ["--color=no", "-q", "--rootdir=.", *self._options, "--", *test_files]
        import_path = ":".join((self._pool.plugin_folder, *self._import_folders))
        request, body = exec_job(
            argv,
            timeout_s=self._timeout_s,
            output_cap_bytes=self._cap,
            env={
                TARGET_VARIABLE: str(REPORT_FD),
                "PYTHONPATH": import_path,
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            },
            files={**files, **test_files},
            fresh=True,
            wants_report=True,
        )
        return read_suite(exec_result(*self._pool.run(request, body)))


def read_suite(result: ExecResult) -> SuiteReport:
    """Read the plugin's report; incomplete when report and exit status disagree."""
    outcomes = read_report(result.report, "", result.exit_code)
    bad = [name for name, status in outcomes.statuses.items() if status in BAD]
    failure = None
    if bad or not outcomes.complete:
        late = result.timed_out or result.cpu_exceeded
        kind: FailureKind = "failed" if outcomes.complete else "timeout" if late else "crash"
        failure = Failure(bad[0] if bad else "", kind)
    return SuiteReport(outcomes.statuses, failure, outcomes.complete, result.output)
