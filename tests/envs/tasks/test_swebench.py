"""SWE-bench rows of both forms: what is read, what is refused, and the tasks they become."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from envs.errors import TaskError
from envs.tasks.swebench import (
    agent_task,
    choose_image,
    is_cut,
    load_rows,
    read_row,
    training_task,
)

CLASSIC: dict[str, object] = {
    "instance_id": "psf__requests-1142",
    "repo": "psf/requests",
    "version": "1.1",
    "base_commit": "22623bd8c265b78b161542663ee980738441c307",
    "problem_statement": "  requests.get is broken\n",
    "patch": "diff --git a/r.py b/r.py\n",
    "test_patch": "",
    "FAIL_TO_PASS": '["test_requests.py::RequestsTestCase::test_no_content_length"]',
    "PASS_TO_PASS": '["test_requests.py::RequestsTestCase::test_basic[a"]',
}
SCRIPT = "\n".join(
    (
        "#!/bin/bash",
        "git apply -v - <<'EOF'\nEOF",
        ": '>>>>> Start Test Output'",
        "pytest -rA",
        ": '>>>>> End Test Output'",
        "git checkout x",
    )
)
FIFTH: dict[str, object] = {
    **CLASSIC,
    "image": "local/requests:1",
    "eval_script": SCRIPT,
    "log_parser": "parse_log_requests",
    "eval_type": "pass_and_fail",
    "test_patch": ("diff --git a/t.py b/t.py\n--- a/t.py\n+++ b/t.py\n@@ -1 +1 @@\n-a\n+b\n"),
}


def test_both_forms_are_read() -> None:
    classic, fifth = read_row(CLASSIC), read_row(FIFTH)
    assert (classic.form, fifth.form) == ("classic", "5.x")
    assert classic.fail_to_pass == ("test_requests.py::RequestsTestCase::test_no_content_length",)
    assert read_row({**CLASSIC, "FAIL_TO_PASS": ["a"]}).fail_to_pass == ("a",)
    assert fifth.raw is FIFTH


def test_classic_images_have_two_names_and_the_local_one_wins() -> None:
    row = read_row(CLASSIC)
    local = "sweb.eval.x86_64.psf__requests-1142:latest"
    remote = "swebench/sweb.eval.x86_64.psf_1776_requests-1142:latest"
    assert choose_image(row, lambda name: name == local) == local
    assert choose_image(row, lambda name: False) == remote
    assert choose_image(read_row(FIFTH), lambda name: False) == "local/requests:1"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repo": None}, r"lacks fields: .* expected also \['repo'\]"),
        ({"problem_statement": ""}, "problem_statement"),
        ({"instance_id": "../x"}, "instance_id got='../x'"),
        ({"FAIL_TO_PASS": "[1"}, "FAIL_TO_PASS is not JSON"),
        ({"PASS_TO_PASS": "[1]"}, "expected a list of names"),
        ({"PASS_TO_PASS": {"a": 1}}, "got=dict"),
        ({"image": "x"}, r"got \['image'\] of the 5.x fields"),
        (
            {"image": "x", "log_parser": "p", "eval_type": "t", "eval_script": "pytest"},
            "has no markers",
        ),
    ],
)
def test_unusable_rows_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        read_row({**CLASSIC, **changes})


def test_files_and_folders_of_every_kind(tmp_path: Path) -> None:
    rows = [CLASSIC, {**CLASSIC, "instance_id": "psf__requests-2"}]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "test.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    loaded = [load_rows(str(tmp_path / name)) for name in ("a.json", "a.parquet", "")]
    ids = [[row.instance_id for row in found] for found in loaded]
    assert ids == [["psf__requests-1142", "psf__requests-2"]] * 3
    (only,) = load_rows(str(tmp_path / "a.json"), instance_ids=["psf__requests-2"])
    assert only.instance_id == "psf__requests-2"
    with pytest.raises(TaskError, match=r"no such instances: got=\['typo'\] of 2 rows"):
        load_rows(str(tmp_path / "a.json"), instance_ids=["typo"])
    with pytest.raises(TaskError, match=r"expected one of .*dev.parquet"):
        load_rows(str(tmp_path), split="dev")
    (tmp_path / "a.json").write_text(json.dumps([CLASSIC, CLASSIC]))
    with pytest.raises(TaskError, match="appear twice"):
        load_rows(str(tmp_path / "a.json"))


def test_the_agents_task_holds_nothing_that_grades() -> None:
    task = agent_task(read_row(FIFTH), "image:1")
    assert (task.issue, task.base) == ("requests.get is broken", CLASSIC["base_commit"])
    assert (task.expected, task.hidden_files, task.plan.command) == ({}, {}, ())


def test_a_training_task_runs_the_rows_own_script_up_to_its_end_mark() -> None:
    task = training_task(read_row(FIFTH), "image:1")
    assert task.plan.command[:2] == ("bash", "-c")
    assert task.plan.command[2].endswith("pytest -rA")
    assert task.plan.judged_paths == ()
    with_files = training_task(read_row(FIFTH), "image:1", {"t.py": b"b\n"}).plan
    assert (with_files.judged_paths, with_files.files) == (
        ("/testbed/t.py",),
        {"/testbed/t.py": b"b\n"},
    )
    assert "git apply" not in with_files.command[2]
    assert with_files.command[2].endswith("pytest -rA")
    # the cut-off name is left out and counted, never guessed
    assert task.expected == {"test_requests.py::RequestsTestCase::test_no_content_length": "PASSED"}
    assert task.metadata["names_left_out"] == "1"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"log_parser": "parse_log_django"}, "expected tests run by pytest"),
        ({"FAIL_TO_PASS": ["t.py::test_ogip[log(photon"]}, "are cut off"),
    ],
)
def test_rows_that_cannot_give_a_training_reward_are_refused(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(TaskError, match=message):
        training_task(read_row({**FIFTH, **changes}), "image:1")
    with pytest.raises(TaskError, match="no test command"):
        training_task(read_row(CLASSIC), "image:1")


def test_cut_names_are_those_with_an_open_bracket() -> None:
    assert is_cut("t.py::test_ogip[log(photon")
    assert not is_cut("t.py::test_x[a-'str' object]")
    assert not is_cut("test_x (app.tests.T)")
