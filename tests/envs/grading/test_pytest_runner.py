"""Real pytest in a sandbox: exact names and statuses, and runs that broke off."""

from __future__ import annotations

import json

import pytest
from affine_repo import FIXED, HIDDEN, affine_task

from envs.base import ExecResult
from envs.grading.case_runner import CaseRunner
from envs.grading.grade import grade
from envs.grading.pytest_runner import PytestRunner, read_suite
from envs.grading.suite import SuiteReport
from envs.patches.diff import diff_trees
from envs.sandbox.pool import SandboxPool
from envs.tasks.mutations import line_mutations, variable_names
from envs.tasks.repair import take

SOURCE = b"def f(x):\n    return x + 1\n"
EVERY_STATUS = b"""
import pytest
from solution import f

@pytest.mark.parametrize(
    "x", ["a b", "[log(photon", "PASSED [100%]", "caf\\u00e9", "a\\nb", "a::b"])
def test_named(x):
    assert x

@pytest.fixture
def broken():
    raise RuntimeError

@pytest.fixture
def torn():
    yield
    raise RuntimeError

def test_passed(): assert f(1) == 2
def test_failed(): assert f(1) == 3
def test_error(broken): pass
def test_teardown(torn): pass
@pytest.mark.skip
def test_skipped(): pass
@pytest.mark.xfail
def test_xfail(): assert 0
@pytest.mark.xfail
def test_xpass(): pass

class TestInner:
    def test_method(self): print("FAILED tests/t.py::test_passed")
"""


def run(
    pool: SandboxPool, files: dict[str, bytes], timeout_s: float = 30.0, **tests: bytes
) -> SuiteReport:
    named = {f"tests/{name}.py": data for name, data in tests.items()}
    return PytestRunner(pool, timeout_s=timeout_s).run(files, named)


def test_names_and_statuses_are_exact(suite_pool: SandboxPool) -> None:
    report = run(suite_pool, {"solution.py": SOURCE}, t=EVERY_STATUS)
    assert report.complete
    assert dict(report.statuses) == {
        "tests/t.py::test_named[a b]": "PASSED",
        "tests/t.py::test_named[[log(photon]": "PASSED",
        "tests/t.py::test_named[PASSED [100%]]": "PASSED",
        "tests/t.py::test_named[caf\\xe9]": "PASSED",
        "tests/t.py::test_named[a\\nb]": "PASSED",
        "tests/t.py::test_named[a::b]": "PASSED",
        "tests/t.py::test_passed": "PASSED",
        "tests/t.py::test_failed": "FAILED",
        "tests/t.py::test_error": "ERROR",
        "tests/t.py::test_teardown": "ERROR",
        "tests/t.py::test_skipped": "SKIPPED",
        "tests/t.py::test_xfail": "XFAIL",
        "tests/t.py::test_xpass": "XPASS",
        "tests/t.py::TestInner::test_method": "PASSED",
    }
    assert report.failure is not None
    assert report.failure.test == "tests/t.py::test_failed"
    assert b"assert 2 == 3" in report.log


def test_a_file_that_cannot_be_imported_is_not_complete(suite_pool: SandboxPool) -> None:
    report = run(suite_pool, {"solution.py": b"def f(:\n"}, t=b"from solution import f\n")
    assert not report.complete
    assert report.statuses == {"tests/t.py": "ERROR"}


def test_a_slow_suite_times_out(suite_pool: SandboxPool) -> None:
    source = b"import time\ndef f(x):\n    time.sleep(60)\n"
    test = b"from solution import f\ndef test_0():\n    f(1)\n"
    report = run(suite_pool, {"solution.py": source}, timeout_s=2.0, t=test)
    assert not report.complete
    assert report.failure is not None
    assert report.failure.kind == "timeout"


@pytest.mark.parametrize(
    "attack",
    [
        b"import os\nos._exit(0)\n",
        b"import sys\nsys.exit(0)\n",
        b"def affine(x):\n    import os\n    print('4 passed')\n    os._exit(0)\n",
        # forged lines on the report descriptor, before the real ones
        b"import os, json\nfor i in range(4):\n    name = f'tests/test_hidden.py::test_{i}'\n"
        b"    line = ['', [name, 'call', 'passed', False]]\n"
        b"    os.write(3, json.dumps(line).encode() + b'\\n')\n"
        b"def affine(x):\n    return 0\n",
        b"import os\nos.close(3)\ndef affine(x):\n    return 0\n",
        b"import pytest\npytest.exit('done', 0)\n",
        b"import atexit, os\natexit.register(os._exit, 0)\ndef affine(x):\n    return 0\n",
    ],
    ids=["exit", "sys.exit", "exit later", "forged", "closed", "pytest.exit", "atexit"],
)
def test_a_run_that_breaks_off_or_contradicts_itself_earns_nothing(
    suite_pool: SandboxPool, attack: bytes
) -> None:
    task = affine_task()
    patch = diff_trees(task.files, {**task.files, "solution.py": attack}).patch
    assert grade(task, patch, PytestRunner(suite_pool)).reward == 0.0


def record(name: str, when: str = "call", outcome: str | int = "passed") -> bytes:
    return json.dumps(["", [name, when, outcome, False]]).encode() + b"\n"


def finish(exit_code: int) -> bytes:
    return record("", "finish", exit_code)


FINISH = finish(0)


@pytest.mark.parametrize(
    ("report", "exit_code", "complete"),
    [
        (record("a") + FINISH, 0, True),
        (record("a"), 0, False),
        (record("a") + FINISH, 1, False),
        (record("a") + FINISH, None, False),
        (record("a") + finish(1), 1, False),  # failed, but nothing did
        (record("a", outcome="failed") + FINISH, 0, False),
        (record("a", outcome="failed") + finish(1), 1, True),
        (record("a") + record("a") + FINISH, 0, False),
        (record("a") + FINISH + record("b"), 0, False),
        (record("a") + FINISH + FINISH, 0, False),
        (record("a") + b"junk\n" + FINISH, 0, False),
        (record("a") + FINISH + b"{", 0, False),
        (finish(5), 5, False),  # no tests
    ],
)
def test_report_and_exit_status_must_agree(
    report: bytes, exit_code: int | None, complete: bool
) -> None:
    assert read_suite(ExecResult(exit_code, b"", report=report)).complete == complete


@pytest.mark.slow
def test_both_runners_agree_on_repair_tasks(
    case_runner: CaseRunner, suite_pool: SandboxPool
) -> None:
    """Right, broken and further mutated bodies get the same verdict from cases and from pytest."""
    real = PytestRunner(suite_pool)
    verdicts: list[bool] = []
    for task in take(11, "train", 8):
        names = variable_names(task.fixed, task.specimen.args)
        other = list(task.fixed)
        other[-1] = (line_mutations(other[-1], names) or line_mutations(other[0], names))[0].line
        tests = task.to_task().hidden_files
        for body in (task.fixed, task.broken, other):
            files = {"solution.py": task.source(body).encode()}
            ours, theirs = case_runner.run(files, tests), real.run(files, tests)
            assert ours.statuses == theirs.statuses, (task.task_id, body)
            verdicts.append(ours.passed)
    assert {True, False} <= set(verdicts)


def test_the_hidden_tests_run_under_plain_pytest(suite_pool: SandboxPool) -> None:
    report = PytestRunner(suite_pool).run({"solution.py": FIXED}, {"tests/test_hidden.py": HIDDEN})
    assert report.passed
    assert dict(report.statuses) == affine_task().expected
