"""A tree as a real git repository of one commit, for people and for tools that want one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from envs.base import Task
from envs.errors import TaskError

COMMITTED_AT = "2000-01-01T00:00:00Z"  # fixed, so that the same tree gives the same commit


def write_repository(task: Task, folder: Path, *, hidden_tests: bool = False) -> str:
    """Write the base commit and the issue (``ISSUE.md``) below ``folder``; returns the commit id.

    The same task gives the same commit. ``hidden_tests`` adds the tests that grade, uncommitted.
    Raises ``TaskError`` when the folder is not empty or git fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise TaskError(f"got {folder}, which is not empty; expected a new or an empty folder")
    files = {**task.files, "ISSUE.md": f"{task.issue}\n".encode()}
    commit = commit_tree(files, folder, f"Base of {task.task_id}")
    if hidden_tests:
        _write(folder, task.hidden_files)
    return commit


def commit_tree(files: Mapping[str, bytes], folder: Path, message: str = "base") -> str:
    """Write ``files`` to ``folder`` and commit them; returns the commit id.

    The id depends on files and message alone. Raises ``TaskError`` when git fails.
    """
    _write(folder, files)
    for arguments in (
        ("init", "--quiet", "--initial-branch=main", "--template="),
        ("add", "--all", "--force"),
        ("commit", "--quiet", f"--message={message}"),
    ):
        _git(folder, *arguments)
    return _git(folder, "rev-parse", "HEAD").strip()


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    for path, data in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def _git(folder: Path, *arguments: str) -> str:
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "LC_ALL": "C",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
    }
    for who in ("AUTHOR", "COMMITTER"):
        environment |= {
            f"GIT_{who}_NAME": "tasks",
            f"GIT_{who}_EMAIL": "tasks@localhost",
            f"GIT_{who}_DATE": COMMITTED_AT,
        }
    argv = ["git", "-c", "core.autocrlf=false", "-c", "commit.gpgsign=false", *arguments]
    done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, check=False)
    if done.returncode != 0:
        raise TaskError(f"git {arguments[0]} failed: got={done.stderr[-300:]!r}")
    return done.stdout.decode()
