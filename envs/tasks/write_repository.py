"""A task as a real git repository on disk, for people and for tools that want one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from envs.base import Task
from envs.errors import TaskError

_IDENTITY = {
    f"GIT_{role}_{name}": value
    for role in ("AUTHOR", "COMMITTER")
    for name, value in (
        ("NAME", "task"),
        ("EMAIL", "task@example.invalid"),
        ("DATE", "2000-01-01T00:00:00+0000"),
    )
}


def write_repository(task: Task, folder: Path, *, hidden_tests: bool = False) -> str:
    """Write the base commit and the issue (``ISSUE.md``) below ``folder``; returns the commit id.

    The same task gives the same commit. ``hidden_tests`` adds the tests that grade, uncommitted.
    Raises ``TaskError`` when the folder is not empty or git fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise TaskError(f"got {folder}, which is not empty; expected a new or an empty folder")
    files = {**task.files, "ISSUE.md": f"{task.issue}\n".encode()}
    _write(folder, files)
    for arguments in (
        ("init", "--quiet", "--initial-branch=main"),
        ("add", "--all", "--force"),
        ("commit", "--quiet", "--no-gpg-sign", "--message", f"Base of {task.task_id}"),
    ):
        _git(folder, *arguments)
    if hidden_tests:
        _write(folder, dict(task.hidden_files))
    return _git(folder, "rev-parse", "HEAD").strip()


def _write(folder: Path, files: dict[str, bytes]) -> None:
    for path, data in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def _git(folder: Path, *arguments: str) -> str:
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(folder),
        "GIT_CONFIG_NOSYSTEM": "1",
        **_IDENTITY,
    }
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, env=environment
    )
    if done.returncode != 0:
        raise TaskError(f"git {arguments[0]} in {folder} failed: {done.stderr.strip()}")
    return done.stdout
