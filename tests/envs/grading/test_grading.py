"""From a patch to a score: what counts, what is undone, and what is nobody's fault."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from affine_repo import BROKEN, FIXED, HIDDEN, VISIBLE, affine_task

from envs.errors import InfrastructureError, TaskError
from envs.grading.case_runner import CaseRunner
from envs.grading.grade import grade, grading_tree
from envs.grading.suite import SuiteReport
from envs.patches.diff import diff_trees
from envs.tasks.repair import take


class FailingRunner:
    """A runner whose machinery is broken."""

    def run(self, files: Mapping[str, bytes], test_files: Mapping[str, bytes]) -> SuiteReport:
        raise InfrastructureError("no space left on device")


class SayingRunner:
    """Reports what it was told to, and keeps what it was given."""

    def __init__(self, report: SuiteReport) -> None:
        self.report = report
        self.seen: list[tuple[dict[str, bytes], dict[str, bytes]]] = []

    def run(self, files: Mapping[str, bytes], test_files: Mapping[str, bytes]) -> SuiteReport:
        self.seen.append((dict(files), dict(test_files)))
        return self.report


ALL = SuiteReport({f"tests/test_hidden.py::test_{i}": "PASSED" for i in range(4)})


def patch_of(**changes: bytes | None) -> bytes:
    """A patch from the base tree; ``__`` in a name is ``/`` and None deletes."""
    base = dict(affine_task().files)
    current = dict(base)
    for name, data in changes.items():
        path = name.replace("__", "/").replace("_dot_", ".")
        if data is None:
            del current[path]
        else:
            current[path] = data
    return diff_trees(base, current).patch


def test_gold_wrong_and_half_right(case_runner: CaseRunner) -> None:
    task = affine_task()
    gold = grade(task, task.solution, case_runner)
    assert (gold.reward, gold.status, gold.passed, gold.failed) == (1.0, "graded", 4, 0)
    half = grade(task, patch_of(solution_dot_py=BROKEN.replace(b"+ 4", b"+ 5")), case_runner)
    assert (half.reward, half.passed, half.failed) == (0.0, 1, 3)
    assert half.reason == "3 of 4 tests not as expected"


def test_an_empty_patch_earns_nothing_and_runs_nothing() -> None:
    score = grade(affine_task(), b"", FailingRunner())
    assert (score.reward, score.status, score.reason) == (0.0, "graded", "empty patch")


def test_a_patch_that_does_not_apply_is_a_graded_zero() -> None:
    damaged = affine_task().solution.replace(b"-    t = x * 2", b"-    t = x * 7")
    score = grade(affine_task(), damaged, FailingRunner())
    assert (score.reward, score.status) == (0.0, "graded")
    assert "does not apply" in score.reason


def test_infrastructure_trouble_is_no_reward_at_all() -> None:
    score = grade(affine_task(), affine_task().solution, FailingRunner())
    assert (score.reward, score.status) == (None, "infrastructure")
    assert "no space left" in score.reason


def test_protected_files_come_from_the_base_and_are_reported() -> None:
    task = affine_task()
    runner = SayingRunner(ALL)
    patch = patch_of(
        solution_dot_py=FIXED,
        tests__test_visible_dot_py=b"",
        tests__conftest_dot_py=b"raise SystemExit(0)\n",
        conftest_dot_py=b"import os; os._exit(0)\n",
        pytest_dot_ini=b"[pytest]\naddopts = -p cheat\n",
        deep__conftest_dot_py=b"x = 1\n",
        sitecustomize_dot_py=b"x = 1\n",
        cheat_dot_pth=b"import os\n",
        helper_dot_py=b"x = 1\n",
    )
    score = grade(task, patch, runner)
    ((files, tests),) = runner.seen
    assert set(files) == {"README.md", "solution.py", "helper.py"}
    assert files["solution.py"] == FIXED
    assert tests == {"tests/test_hidden.py": HIDDEN}
    assert set(score.protected_touched) == {
        "tests/test_visible.py",
        "tests/conftest.py",
        "conftest.py",
        "pytest.ini",
        "deep/conftest.py",
        "sitecustomize.py",
        "cheat.pth",
    }


def test_a_patch_of_protected_files_alone_earns_nothing_and_runs_nothing() -> None:
    score = grade(affine_task(), patch_of(tests__test_visible_dot_py=None), FailingRunner())
    assert (score.reward, score.status) == (0.0, "graded")
    assert score.protected_touched == ("tests/test_visible.py",)


def test_a_base_test_configuration_stays_even_when_the_patch_deletes_it() -> None:
    ini = b"[pytest]\n"
    task = affine_task(files={**affine_task().files, "pytest.ini": ini})
    current = {**task.files, "solution.py": FIXED}
    del current["pytest.ini"]
    tree = grading_tree(task, diff_trees(task.files, current).patch)
    assert tree.files["pytest.ini"] == ini
    assert tree.protected_touched == ("pytest.ini",)


def test_planting_the_hidden_file_does_not_replace_it() -> None:
    runner = SayingRunner(ALL)
    planted = patch_of(solution_dot_py=FIXED, tests__test_hidden_dot_py=VISIBLE)
    score = grade(affine_task(protected=()), planted, runner)
    assert runner.seen[0][1] == {"tests/test_hidden.py": HIDDEN}
    assert score.protected_touched == ("tests/test_hidden.py",)


@pytest.mark.parametrize(
    "report",
    [
        SuiteReport({}),
        SuiteReport({**ALL.statuses, "tests/test_hidden.py::test_0": "FAILED"}),
        SuiteReport({**ALL.statuses, "tests/test_hidden.py::test_0": "SKIPPED"}),
        SuiteReport({**ALL.statuses, "tests/test_hidden.py::test_0": "XPASS"}),
        SuiteReport({**ALL.statuses, "tests/test_hidden.py::test_9": "PASSED"}),
        SuiteReport({k: v for k, v in ALL.statuses.items() if not k.endswith("3")}),
        SuiteReport(ALL.statuses, complete=False),
    ],
    ids=["none", "failed", "skipped", "xpass", "extra", "missing", "broken off"],
)
def test_only_exactly_the_expected_statuses_are_solved(report: SuiteReport) -> None:
    task = affine_task()
    assert grade(task, task.solution, SayingRunner(report)).reward == 0.0
    assert grade(task, task.solution, SayingRunner(ALL)).reward == 1.0


def test_an_expected_failure_must_fail() -> None:
    name = "tests/test_hidden.py::test_0"
    task = affine_task(expected={**affine_task().expected, name: "FAILED"})
    assert grade(task, task.solution, SayingRunner(ALL)).reward == 0.0
    wanted = SuiteReport({**ALL.statuses, name: "FAILED"})
    assert grade(task, task.solution, SayingRunner(wanted)).reward == 1.0


def test_a_task_that_expects_tests_of_no_file_is_an_error(case_runner: CaseRunner) -> None:
    task = affine_task(expected={"tests/none.py::test_0": "PASSED"})
    with pytest.raises(TaskError, match="lacks"):
        grade(task, task.solution, case_runner)


def test_generated_repair_tasks_are_sound(case_runner: CaseRunner) -> None:
    for repair in take(5, "heldout", 12):
        task = repair.to_task()
        assert grade(task, task.solution, case_runner).reward == 1.0
        unhelpful = diff_trees(task.files, {**task.files, "notes.txt": b"none\n"}).patch
        assert grade(task, unhelpful, case_runner).reward == 0.0


def test_a_patch_that_would_fill_the_grading_sandbox_is_a_graded_zero() -> None:
    task = affine_task()
    large = {f"f{i}.txt": b"x" * 1_000_000 + b"\n" for i in range(3)}
    many = {f"f{i}.txt": b"x\n" for i in range(2001)}
    deep = {"/".join(["d"] * 400) + f"/{i}/" + "e/" * 50 + "f": b"x\n" for i in range(40)}
    for added in (large, many, deep):
        patch = diff_trees(task.files, {**task.files, **added}).patch
        score = grade(task, patch, FailingRunner())
        assert (score.reward, score.status) == (0.0, "graded"), score.reason
