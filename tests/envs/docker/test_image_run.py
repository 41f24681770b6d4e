"""A run of official tests: what code under test does to tests, report and disk is its own doing."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from yes_engine import YesEngine, make_box, make_engine

from envs.errors import TaskError, TaskTimeoutError
from envs.grading.plugin_report import TARGET_VARIABLE
from envs.images.grading import ImageGrader
from envs.images.official_tests import TestRun, run_tests
from envs.images.task import ImageTask, TestPlan
from envs.images.validation import ValidationCache
from envs.sandbox.docker.docker_errors import ArchiveTooLargeError
from envs.sandbox.docker.host import DockerHost
from envs.sandbox.docker.options import DockerOptions

PLAN = TestPlan(("pytest",), ("/testbed/tests",))
TESTS = {"tests/test_a.py": b"def test_a(): ...\n"}
PATCH = b"diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-x\n+y\n"
Deed = Callable[[YesEngine, str], None]  # what the tests do: engine, path of the report


def run(deed: Deed) -> TestRun:
    engine = make_engine()
    engine.folders["/testbed/tests"] = TESTS

    def act(env: Mapping[str, str]) -> int:
        report = env[TARGET_VARIABLE]
        nonce = posixpath.basename(report)
        records = [["tests/test_a.py::test_a", "call", "passed", False], ["", "finish", 0, False]]
        lines = "".join(json.dumps([nonce, record]) + "\n" for record in records)
        engine.folders[report] = {nonce: lines.encode()}
        deed(engine, report)
        return 0

    engine.act = act
    return run_tests(make_box(engine), PLAN)


def nothing(engine: YesEngine, report: str) -> None:
    return None


def test_an_honest_run_is_complete() -> None:
    found = run(nothing)
    assert (found.outcomes.complete, found.tests_changed) == (True, False)
    assert found.outcomes.statuses == {"tests/test_a.py::test_a": "PASSED"}


def change(engine: YesEngine, report: str) -> None:
    engine.folders["/testbed/tests"] = {"tests/test_a.py": b"def test_a(): pass\n"}


def remove(engine: YesEngine, report: str) -> None:
    del engine.folders["/testbed/tests"]


def flood(engine: YesEngine, report: str) -> None:
    engine.folders["/testbed/tests"] = ArchiveTooLargeError("too large")


@pytest.mark.parametrize("deed", [change, remove, flood])
def test_tests_that_are_changed_removed_or_flooded_have_changed(deed: Deed) -> None:
    assert run(deed).tests_changed


def remove_report(engine: YesEngine, report: str) -> None:
    del engine.folders[report]


def flood_report(engine: YesEngine, report: str) -> None:
    engine.folders[report] = ArchiveTooLargeError("too large")


@pytest.mark.parametrize("deed", [remove_report, flood_report])
def test_a_report_that_is_removed_or_flooded_is_a_run_that_broke_off(deed: Deed) -> None:
    found = run(deed)
    assert (found.outcomes.complete, found.outcomes.reason) == (False, "the run broke off")


def test_a_task_whose_tests_take_too_long_is_refused_but_not_for_good(tmp_path: Path) -> None:
    """A busy machine must not take a task out of every later run."""
    engine = make_engine()
    engine.folders["/testbed/tests"] = TESTS
    host = DockerHost(engine, "run", free_bytes=lambda folder: 1 << 40)
    plan = replace(PLAN, timeout_s=0.2)
    task = ImageTask("a", "issue", {}, "", (), {}, {"t": "PASSED"}, PATCH, image="image", plan=plan)
    grader, cache = ImageGrader(host, DockerOptions()), ValidationCache(tmp_path)
    engine.act = lambda env: None
    with pytest.raises(TaskTimeoutError, match=r"ran into their time limit: got more than 0\.2 s"):
        cache.check(task, grader, "sha256:1")
    assert list(tmp_path.iterdir()) == []
    engine.act = lambda env: 1
    for _ in range(2):
        with pytest.raises(TaskError, match="the gold patch of a fails"):
            cache.check(task, grader, "sha256:1")
    assert len(list(tmp_path.iterdir())) == 1


def test_a_control_run_that_does_not_end_says_nothing_about_the_tests() -> None:
    """Else all of them would count as turned, and honest code that passes one as forged."""
    engine = make_engine()
    engine.folders["/testbed/tests"] = {"tests/test_a.py": b"def test_a():\n    assert f() == 1\n"}
    host = DockerHost(engine, "run", free_bytes=lambda folder: 1 << 40)
    plan = replace(PLAN, timeout_s=0.2)
    name = "tests/test_a.py::test_a"
    task = ImageTask("a", "i", {}, "", (), {}, {name: "PASSED"}, PATCH, image="image", plan=plan)
    codes: list[int | None] = [1, 0, None]  # the base commit, the fix, its control run

    def act(env: Mapping[str, str]) -> int | None:
        code = codes.pop(0)
        report = env[TARGET_VARIABLE]
        outcome = "passed" if code == 0 else "failed"
        records = [[name, "call", outcome, False], ["", "finish", code or 0, False]]
        nonce = posixpath.basename(report)
        lines = "".join(json.dumps([nonce, record]) + "\n" for record in records)
        engine.folders[report] = {nonce: lines.encode()}
        return code

    engine.act = act
    with pytest.raises(TaskTimeoutError):
        ImageGrader(host, DockerOptions()).check(task)
    codes[:] = [1, 0, 1]
    assert ImageGrader(host, DockerOptions()).check(task).controls == {name}


def test_tests_that_fill_the_disk_are_stopped_at_the_containers_limit() -> None:
    engine = make_engine()
    box = make_box(engine, DockerOptions(disk_bytes=1 << 20))

    def fill(env: Mapping[str, str]) -> None:
        engine.added = 2 << 20

    engine.act = fill
    result = box.exec_trusted(["pytest"], timeout_s=30)
    assert (result.exit_code, result.timed_out) == (137, False)
    assert b"more than its disk limit" in result.output
    assert result.seconds < 5
