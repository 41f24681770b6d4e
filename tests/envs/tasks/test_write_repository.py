"""A repair task as a git repository: real git, real pytest, broken before the fix, right after."""

import subprocess
import sys
from pathlib import Path

import pytest

from envs.errors import TaskError
from envs.tasks.repair import take
from envs.tasks.write_repository import write_repository


def _pytest(folder: Path, tests: str) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests]
    return subprocess.run(command, cwd=folder, capture_output=True).returncode


def _apply(folder: Path, patch: bytes) -> None:
    subprocess.run(["git", "apply", "-"], cwd=folder, input=patch, check=True)


def test_hidden_tests_fail_before_and_pass_after_the_fix(tmp_path: Path) -> None:
    for number, repair in enumerate(take(1, "heldout", 3)):
        task, folder = repair.to_task(), tmp_path / str(number)
        write_repository(task, folder, hidden_tests=True)
        assert _pytest(folder, "tests/test_hidden.py") == 1
        assert _pytest(folder, "tests/test_visible.py") == 1
        _apply(folder, task.solution)
        assert _pytest(folder, "tests") == 0


def test_the_same_task_gives_the_same_commit_without_the_hidden_tests(tmp_path: Path) -> None:
    task = take(1, "train", 1)[0].to_task()
    first = write_repository(task, tmp_path / "a")
    assert write_repository(task, tmp_path / "b", hidden_tests=True) == first
    listed = subprocess.run(
        ["git", "ls-files"], cwd=tmp_path / "b", capture_output=True, text=True, check=True
    ).stdout.split()
    assert sorted(listed) == ["ISSUE.md", "README.md", "solution.py", "tests/test_visible.py"]


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(TaskError, match="not empty"):
        write_repository(take(1, "train", 1)[0].to_task(), tmp_path)
