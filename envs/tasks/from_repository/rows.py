"""Tasks as rows of SWE-bench (5.x form) and of R2E-Gym, and the folder that their image needs."""

from __future__ import annotations

import json

from envs.errors import TaskError
from envs.tasks.from_repository.made_task import MadeTask
from envs.tasks.write_repository import COMMITTED_AT

JsonRow = dict[str, object]
_HEREDOC = "EOF_114329324912"  # as SWE-bench's own scripts
_RUNNER_CONFIG = ("pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml")
_START_HOOKS = ("conftest.py", "sitecustomize.py", "usercustomize.py")
R2E_FOLDER = "r2e_tests"


def swebench_row(task: MadeTask, image: str, commit: str) -> JsonRow:
    """Return the 5.x form: everything that the official harness needs to grade.

    Its parsers cut a test's name at white space; tests with such names are not listed.
    """
    fail, keep = set(task.failing), [n for n, s in task.expected.items() if s == "PASSED"]
    named = [name for name in keep if name.split() == [name]]
    if not fail & set(named):
        raise TaskError(f"{task.task_id}: got only failing tests with white space in their names")
    return {
        "instance_id": task.task_id,
        "repo": f"local/{task.repository.name}",
        "version": task.repository.version,
        "base_commit": commit,
        "environment_setup_commit": commit,
        "image": image,
        "problem_statement": task.issue,
        "hints_text": "",
        "created_at": COMMITTED_AT,
        "patch": _text(task.solution),
        "test_patch": _text(task.test_patch),
        "FAIL_TO_PASS": [name for name in named if name in fail],
        "PASS_TO_PASS": [name for name in named if name not in fail],
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        "eval_script": eval_script(task, commit),
    }


def eval_script(task: MadeTask, commit: str) -> str:
    """Write the script that restores tests and runner settings, adds hidden tests and runs all."""
    restored = [p for p in task.base_files if p in _protected(task)]
    planted = [n for n in (*_RUNNER_CONFIG, *_START_HOOKS) if n not in task.base_files]
    tests = " ".join(_quote(p) for p in sorted({n.partition("::")[0] for n in task.expected}))
    restore = [f"git checkout {commit} -- {' '.join(map(_quote, restored))}"] if restored else []
    return "\n".join(
        [
            "#!/bin/bash",
            "set -uxo pipefail",
            "cd /testbed",
            "git config --global --add safe.directory /testbed",
            "git status",
            f"git -c core.fileMode=false diff {commit}",
            f"rm -rf {' '.join(map(_quote, (*planted, *task.hidden)))}",
            *restore,
            f"git apply -v - <<'{_HEREDOC}'\n{_text(task.test_patch)}\n{_HEREDOC}",
            f"export PYTHONDONTWRITEBYTECODE=1 PYTHONPATH={_import_path(task)}",
            ": '>>>>> Start Test Output'",
            f"python3 -m pytest -rA -o addopts= -p no:cacheprovider {tests}",
            ": '>>>>> End Test Output'",
            f"rm -rf {' '.join(map(_quote, task.hidden))}",
            "",
        ]
    )


def r2e_row(task: MadeTask, image: str, commit: str) -> JsonRow:
    """Return R2E-Gym's form. ``expected_output_json`` has its names: those parts after the file."""
    expected = {r2e_name(name): status for name, status in task.expected.items()}
    shown = {name: status for name, status in expected.items() if status == "PASSED"}
    commits: JsonRow = {
        "file_diffs": [_file_diff(task)],
        "old_commit_hash": commit,
        "new_commit_hash": "",
        "commit_message": "",
        "commit_date": COMMITTED_AT,
    }
    return {
        "repo_name": task.repository.name,
        "docker_image": image,
        "commit_hash": commit,
        "parsed_commit_content": json.dumps(commits),
        "execution_result_content": "{}",
        "modified_files": [task.path],
        "modified_entity_summaries": [],
        "relevant_files": [task.path],
        "num_non_test_files": 1,
        "num_non_test_func_methods": 1,
        "num_non_test_lines": _text(task.solution).count("\n+") - 1,
        "prompt": "",
        "problem_statement": f"[ISSUE]\n{task.issue}\n[/ISSUE]",
        "expected_output_json": json.dumps(shown),
    }


def _file_diff(task: MadeTask) -> JsonRow:
    """Return the fix: whoever trains on the row shows with it that the task can be solved."""
    return {
        "header": {"file": {"path": task.path}},
        "is_binary_file": False,
        "minus_file": {"path": f"a/{task.path}"},
        "plus_file": {"path": f"b/{task.path}"},
        "old_file_content": _text(task.content),
        "new_file_content": _text(task.repository.files[task.path]),
    }


def r2e_name(test: str) -> str:
    """Return R2E-Gym's name: ``tests/a.py::TestC::test_x`` is ``TestC.test_x`` there."""
    return ".".join(test.split("::")[1:])


def r2e_tests(task: MadeTask) -> dict[str, bytes]:
    """Return the folder of hidden tests: every test file in use, with its helpers."""
    used = {name.partition("::")[0] for name in task.expected} | {*task.repository.test_support}
    packages = (p for p in task.repository.files if p.endswith("__init__.py") and _beside(p, used))
    return {path: task.repository.files[path] for path in sorted({*used, *packages})}


def run_tests_script(task: MadeTask) -> str:
    """Return ``run_tests.sh`` as R2E-Gym's images have it."""
    return (
        f"PYTHONPATH={_import_path(task)} "
        "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' "
        f".venv/bin/python -W ignore -m pytest -rA -o addopts= {R2E_FOLDER}\n"
    )


def _import_path(task: MadeTask) -> str:
    """Return the import path, before the caller's: a judge may bring modules of its own."""
    folders = ":".join(f"/testbed/{folder}" for folder in task.repository.import_folders)
    return f"{folders}${{PYTHONPATH:+:$PYTHONPATH}}" if folders else "${PYTHONPATH:-}"


def _beside(path: str, used: set[str]) -> bool:
    folder = path.rpartition("/")[0]
    return any(name.startswith(f"{folder}/") for name in used) and "test" in folder


def _protected(task: MadeTask) -> set[str]:
    support, tests = task.repository.test_support, task.repository.test_files
    return {*support, *tests, *_RUNNER_CONFIG, *_START_HOOKS} - {*task.hidden}


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TaskError(f"a row holds text: got={error} expected=a patch in UTF-8") from error


def _quote(path: str) -> str:
    return "'" + path.replace("'", "'\\''") + "'"
