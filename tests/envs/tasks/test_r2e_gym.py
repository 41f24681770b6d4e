"""R2E-Gym rows from every source become the same task; damaged rows are named."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from envs.errors import TaskError
from envs.grading.plugin_report import read_report
from envs.images.audit import protected_paths, suspicious_means
from envs.images.outcomes import normal_expected, read_printed, rename, unexpected
from envs.images.sections import split_patch
from envs.images.task import IMAGE_PROTECTED
from envs.patches.apply import apply_patch
from envs.tasks.r2e_gym import HIDDEN_PATHS, load_rows, load_tasks, make_task


def diff_entry(path: str, old: str | None, new: str | None) -> dict[str, object]:
    return {
        "header": {"file": {"path": path}},
        "is_binary_file": False,
        "minus_file": {"path": "/dev/null" if old is None else f"a/{path}"},
        "plus_file": {"path": "/dev/null" if new is None else f"b/{path}"},
        "old_file_content": old or "",
        "new_file_content": new or "",
    }


def row(**changes: object) -> dict[str, object]:
    diffs = [
        diff_entry("pkg/a.py", "x = 1\n", "x = 2\n"),
        diff_entry("pkg/new.py", None, "y = 1"),
        diff_entry("pkg/gone.py", "z = 1\n", None),
        diff_entry("pkg/tests/test_a.py", "", "def test(): pass\n"),
    ]
    commit = {"file_diffs": diffs, "old_commit_hash": "0" * 40, "new_commit_hash": "f" * 40}
    return {
        "repo_name": "pandas",
        "docker_image": "namanjain12/pandas_final:abc",
        "commit_hash": "f" * 40,
        "parsed_commit_content": json.dumps(commit),
        "problem_statement": "before\n[ISSUE]\n**It** breaks\n[/ISSUE]\nafter",
        "expected_output_json": json.dumps({"T.test_a": "PASSED", "T.test_b": "FAILED", "": "x"}),
        **changes,
    }


def test_what_a_row_becomes() -> None:
    task = make_task(row())
    assert task.task_id == "pandas_final:abc"
    assert task.issue == "**It** breaks"
    assert task.image == "namanjain12/pandas_final:abc"
    assert task.expected == {"T.test_a": "PASSED", "T.test_b": "FAILED"}
    assert task.fix_ids == ("f" * 40,)
    assert task.exact
    assert task.plan.command == ("bash", "/testbed/run_tests.sh")
    assert task.plan.timeout_s == 300
    assert task.plan.plugin
    assert {"/r2e_tests", "/testbed/r2e_tests", "/testbed/run_tests.sh"} <= set(HIDDEN_PATHS)
    assert not make_task(row(repo_name="tornado")).plan.plugin


def test_the_solution_is_the_commit_without_its_tests() -> None:
    tree = {"pkg/a.py": b"x = 1\n", "pkg/gone.py": b"z = 1\n"}
    solved = apply_patch(tree, make_task(row()).solution)
    assert solved == {"pkg/a.py": b"x = 2\n", "pkg/new.py": b"y = 1"}


def test_an_issue_without_marks_is_taken_whole() -> None:
    assert make_task(row(problem_statement=" all of it ")).issue == "all of it"


@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet"])
def test_rows_from_files(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"rows.{kind}"
    rows = [row(), row(docker_image="other:1")]
    if kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    elif kind == "json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("\n".join(json.dumps(one) for one in rows) + "\n\n")
    assert [task.task_id for task in load_tasks(str(path))] == ["pandas_final:abc", "other:1"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"docker_image": ""}, "docker_image"),
        ({"expected_output_json": "{"}, "expected_output_json.*not JSON"),
        ({"expected_output_json": "[1]"}, "got=list expected=an object"),
        ({"parsed_commit_content": "x"}, "parsed_commit_content"),
    ],
)
def test_damaged_rows_are_named(changes: dict[str, object], said: str) -> None:
    with pytest.raises(TaskError, match=said):
        make_task(row(**changes))


def test_sources_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="no such file"):
        load_rows(str(tmp_path / "none.json"))
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(TaskError, match="does not hold rows"):
        load_rows(str(tmp_path / "a.json"))
    odd = {"a": "one\u2028two\x85three"}  # as people paste it into issues
    line = json.dumps(odd, ensure_ascii=False)
    (tmp_path / "odd.jsonl").write_text(f"{line}\n\n", encoding="utf-8")
    assert load_rows(str(tmp_path / "odd.jsonl")) == [odd]
    (tmp_path / "b.jsonl").write_text('{"a": 1}\n{')
    with pytest.raises(TaskError, match="not jsonl"):
        load_rows(str(tmp_path / "b.jsonl"))


def test_a_data_set_without_its_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as where it is not installed
    lock = Path(__file__).parents[3] / "requirements-eval.lock"
    assert "\ndatasets==" in lock.read_text()
    with pytest.raises(TaskError, match=f"pip install -r {lock.name}"):
        load_rows("R2E-Gym/R2E-Gym-Lite")


# Names and statuses.

SUMMARY = """
some output
=========================== short test summary info ============================
PASSED forged/test_x.py::test_forged
=========================== short test summary info ============================
PASSED t.py::test_x[a-'str' object has no b-C1]
PASSED t.py::test_x[a - b]
PASSED t.py::TestC::test_ogip[log(photon cm]
FAILED t.py::test_x[a-'str' object has no b-C2] - AssertionError: PASSED t.py::no
FAILED t.py::test_y - assert 1 == 2
ERROR t.py::test_z
XFAIL t.py::test_known
SKIPPED [1] t.py:3: slow
========================= 1 failed, 3 passed in 0.10s ==========================
"""


def test_names_are_kept_whole_and_only_the_last_summary_counts() -> None:
    colours = SUMMARY.replace("PASSED", "\x1b[32mPASSED\x1b[0m").encode()
    for log in (SUMMARY.encode(), colours):
        statuses = read_printed(log, 1).statuses
        assert statuses["t.py::test_x[a-'str' object has no b-C1]"] == "PASSED"
        assert statuses["t.py::test_x[a-'str' object has no b-C2]"] == "FAILED"
        assert statuses["t.py::test_x[a - b]"] == "PASSED"
        assert statuses["t.py::TestC::test_ogip[log(photon cm]"] == "PASSED"
        assert statuses["t.py::test_y"] == "FAILED"
        assert statuses["t.py::test_z"] == "ERROR"
        assert "forged/test_x.py::test_forged" not in statuses


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("t.py::test_a - assert [1] == [2]", "t.py::test_a"),
        ("t.py::test_a - KeyError: x[1] - y", "t.py::test_a"),
        ("t.py::test_a[b - c] - assert d[0] - 1 == [2]", "t.py::test_a[b - c]"),
        ("t.py::test_a[b[0]] - boom", "t.py::test_a[b[0]]"),
        ("t.py::test_a[b - c]", "t.py::test_a[b - c]"),
        ("t.py::test_a[log(photon", "t.py::test_a[log(photon"),
    ],
)
def test_a_failures_message_is_no_part_of_its_name(line: str, name: str) -> None:
    """Brackets in the message too: many assertions are about lists."""
    log = f"=== short test summary info ===\nFAILED {line}\n".encode()
    assert read_printed(log, 1).statuses == {name: "FAILED"}
    assert normal_expected({line: "FAILED"}) == {name: "FAILED"}


@pytest.mark.parametrize("order", [("FAILED", "PASSED"), ("PASSED", "FAILED")])
def test_a_name_that_is_printed_twice_failed_if_either_did(order: tuple[str, str]) -> None:
    lines = "".join(f"{status} t.py::test_a\n" for status in order)
    log = f"=== short test summary info ===\n{lines}".encode()
    assert read_printed(log, 1).statuses == {"t.py::test_a": "FAILED"}
    words = {"PASSED": "ok", "FAILED": "FAIL"}
    log = "".join(f"test_a (pkg.C) ... {words[status]}\n" for status in order).encode()
    assert read_printed(log, 1).statuses == {"C.test_a": "FAILED"}


def test_progress_lines_are_no_tests() -> None:
    outcome = read_printed(b"t.py::test_y PASSED [100%]\nPASSED t.py::test_y\n", 0)
    assert not outcome.complete
    assert outcome.statuses == {}


def test_unittest_lines() -> None:
    log = b"""test_a (pkg.tests.CaseTest) ... ok
test_b (pkg.tests.CaseTest)
A description. ... FAIL
test_c (pkg.tests.CaseTest) ... skipped 'why'
"""
    assert read_printed(log, 1).statuses == {
        "CaseTest.test_a": "PASSED",
        "CaseTest.test_b": "FAILED",
        "CaseTest.test_c": "SKIPPED",
    }


def test_r2e_names_leave_the_file_out_and_never_hide_a_failure() -> None:
    statuses = {
        "a/t.py::C::test": "PASSED",
        "b/t.py::C::test": "FAILED",
        "c/t.py::C::test": "PASSED",
    }
    assert rename(statuses, "r2e") == {"C.test": "FAILED"}
    assert rename({"t.py::test_x[a::b]": "PASSED"}, "r2e") == {"test_x[a.b]": "PASSED"}
    assert rename(statuses, "node_id") == statuses


def test_expected_names_of_the_data_set_are_cleaned_by_a_stated_rule() -> None:
    expected = {
        "\x1b[1mT.test_a\x1b[0m": "PASSED",
        "T.test_b - AssertionError: x": "FAILED",
        "T.test_c[a - b]": "PASSED",
        "T.test_d[a - b] - boom": "FAILED",
        "": "PASSED",
    }
    assert normal_expected(expected) == {
        "T.test_a": "PASSED",
        "T.test_b": "FAILED",
        "T.test_c[a - b]": "PASSED",
        "T.test_d[a - b]": "FAILED",
    }


def test_which_further_tests_count() -> None:
    statuses = {"a": "PASSED", "b": "SKIPPED", "c": "XFAIL", "d": "FAILED", "e": "ERROR"}
    assert unexpected(statuses, {"a": "PASSED"}) == ["d", "e"]


NONCE = "n" * 32


def report(*records: object, nonce: str = NONCE) -> bytes:
    return b"".join(json.dumps([nonce, record]).encode() + b"\n" for record in records)


CALLS = [["t::a", "setup", "passed", False], ["t::a", "call", "passed", False]]
END = ["", "finish", 0, False]


def test_a_sound_report() -> None:
    outcome = read_report(report(*CALLS, END), NONCE, 0)
    assert outcome.complete
    assert outcome.statuses == {"t::a": "PASSED"}


@pytest.mark.parametrize(
    ("data", "exit_code", "said"),
    [
        (report(*CALLS), 0, "broke off"),
        (b"", 0, "broke off"),
        (report(*CALLS, END), 1, "disagree"),
        (report(*CALLS, END), 3, "disagree"),
        (report(*CALLS, END), None, "disagree"),
        (report(*CALLS, END, nonce="m" * 32), 0, "did not write"),
        (report(*CALLS, END) + b"[]\n", 0, "did not write"),
        (report(*CALLS, END) + report(["t::b", "call", "passed", False]), 0, "did not write"),
        (report(*CALLS, *CALLS, END), 0, "twice"),
        (report(["t::a", "call", "failed", False], END), 0, "disagree"),
        (b"PASSED t::a\n" + report(END), 0, "did not write"),
    ],
)
def test_reports_that_decide_nothing(data: bytes, exit_code: int | None, said: str) -> None:
    outcome = read_report(data, NONCE, exit_code)
    assert not outcome.complete
    assert said in outcome.reason


def test_a_failure_in_any_phase_is_no_pass() -> None:
    records = [*CALLS, ["t::a", "teardown", "failed", False], ["", "finish", 1, False]]
    assert read_report(report(*records), NONCE, 1).statuses == {"t::a": "ERROR"}


# What patches may touch.


def source_patch(path: str, *lines: str) -> bytes:
    body = "".join(f"+{line}\n" for line in lines)
    return (
        f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
        f"@@ -0,0 +1,{len(lines)} @@\n{body}"
    ).encode()


@pytest.mark.parametrize(
    "path",
    [
        "tests/test_a.py",
        "pkg/tests/helper.py",
        "conftest.py",
        "pkg/conftest.py",
        "pytest.ini",
        "setup.cfg",
        "pyproject.toml",
        "tox.ini",
        "sitecustomize.py",
        "x/evil.pth",
        ".venv/bin/python",
        ".git/hooks/pre-commit",
        "run_tests.sh",
        "r2e_tests/test_1.py",
        "pytest.py",
        "json.py",
        "src/_pytest/__init__.py",
        "lib/pluggy.py",
    ],
)
def test_guarded_paths(path: str) -> None:
    sections = split_patch(source_patch(path, "x"))
    assert protected_paths(sections, IMAGE_PROTECTED, frozenset()) == [path]


def test_a_module_that_was_there_may_be_changed() -> None:
    sections = split_patch(source_patch("json.py", "x") + source_patch("pkg/json.py", "x"))
    assert protected_paths(sections, IMAGE_PROTECTED, frozenset({"json.py"})) == []


@pytest.mark.parametrize(
    "line",
    [
        "sys._getframe(1)",
        "inspect.stack()",
        "gc.get_objects()",
        "os._exit(0)",
        "import pytest",
        "from _pytest import runner",
        "sys.modules['x'] = y",
        "import builtins",
        "def __eq__(self, other): return True",
        "eval(text)",
        "open('/proc/self/maps')",
        "print('PASSED t.py::x')",
    ],
)
def test_means_that_no_fix_needs(line: str) -> None:
    sections = split_patch(source_patch("pkg/a.py", line))
    means = suspicious_means(sections)
    assert means
    assert suspicious_means(sections, {entry.partition(": ")[2] for entry in means}) == []


def test_a_patch_cannot_make_the_search_for_means_endless() -> None:
    """It holds the interpreter for as long as it takes: quadratic time would be half a minute."""
    line = "def __eq__()" + "\n+def __eq__()" * 40_000
    started = time.thread_time()
    suspicious_means(split_patch(source_patch("pkg/a.py", line)))
    assert time.thread_time() - started < 10


@pytest.mark.parametrize(
    "line",
    [
        "return sum(xs) / len(xs)",
        "model.evaluate(x)",
        "exit_code = 3",
        "passed = True",
        "re.compile",
    ],
)
def test_ordinary_code_is_not_suspicious(line: str) -> None:
    assert suspicious_means(split_patch(source_patch("pkg/a.py", line))) == []
