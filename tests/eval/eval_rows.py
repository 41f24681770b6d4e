"""Rows and predictions that need no image."""

from __future__ import annotations

from envs.tasks.swebench import SweBenchRow, read_row
from eval.predictions import Prediction

SCRIPT = ": '>>>>> Start Test Output'\npytest\n: '>>>>> End Test Output'\n"


def make_row(number: int, repo: str = "local/calc", **changes: object) -> SweBenchRow:
    row: dict[str, object] = {
        "instance_id": f"local__calc-{number}",
        "repo": repo,
        "version": "1",
        "base_commit": "0" * 40,
        "problem_statement": "wrong",
        "patch": "diff --git a/a.py b/a.py\n",
        "test_patch": "",
        "FAIL_TO_PASS": ["t.py::test_a"],
        "PASS_TO_PASS": "[]",
        "image": "local/calc:1",
        "eval_script": SCRIPT,
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
    }
    return read_row(row | changes)


def make_prediction(number: int, patch: str = "diff\n", model: str = "org/model") -> Prediction:
    return Prediction(f"local__calc-{number}", model, patch)
