"""The folder that a task maker writes, and reading it back.

``tasks.jsonl`` (with ``repository.tar.gz``, the correct tree) for sandboxes without images;
``swebench.jsonl`` and ``r2e_gym.jsonl`` with ``images/<task>/`` for those with; ``report.json``;
``requirements.txt``, what images need, and ``base/``, a recipe for the one that they start from.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from envs.base import Task
from envs.errors import TaskError
from envs.sandbox.archives import pack
from envs.tasks.from_repository import rows
from envs.tasks.from_repository.made_task import MadeTask
from envs.tasks.from_repository.repository import Repository, read_repository
from envs.tasks.write_repository import commit_tree

_REPOSITORY = "repository.tar.gz"
_TASKS, _SWEBENCH, _R2E = "tasks.jsonl", "swebench.jsonl", "r2e_gym.jsonl"
_DOCKERFILE = """\
FROM {base}
ADD testbed.tar /testbed
ADD r2e_tests.tar /r2e_tests
WORKDIR /testbed
RUN python3 -m venv --system-site-packages --without-pip .venv \\
 && git config --system --add safe.directory /testbed
ENV VIRTUAL_ENV=/testbed/.venv PATH=/testbed/.venv/bin:$PATH
"""
_BUILD = """\
#!/bin/sh
# Builds the image of every task here. The base image needs git, python3 and the packages of
# ../requirements.txt: the tests were validated with them, and some are skipped without.
set -eu
cd "$(dirname "$0")"
"""


def write_folder(out: Path, repository: Repository, tasks: Iterable[MadeTask], base: str) -> None:
    """Write every row and image folder. ``base`` is the image that the tasks' images start from."""
    out.mkdir(parents=True, exist_ok=True)
    top = f"{repository.name}-{repository.version or 0}/"
    packed = gzip.compress(pack({top + p: d for p, d in repository.files.items()}), mtime=0)
    (out / _REPOSITORY).write_bytes(packed)
    task_rows: list[rows.JsonRow] = []
    swebench_rows: list[rows.JsonRow] = []
    r2e_rows: list[rows.JsonRow] = []
    build = [_BUILD]
    for task in tasks:
        image = f"{task.task_id.replace('__', '.')}:latest"
        commit = _write_image(out / "images" / task.task_id, task, base)
        build.append(f"docker build --network none --tag {image} {task.task_id}\n")
        task_rows.append(_task_row(task))
        swebench_rows.append(rows.swebench_row(task, image, commit))
        r2e_rows.append(rows.r2e_row(task, image, commit))
    for name, content in ((_TASKS, task_rows), (_SWEBENCH, swebench_rows), (_R2E, r2e_rows)):
        (out / name).write_text("".join(f"{json.dumps(row)}\n" for row in content))
    if task_rows:
        (out / "images" / "build.sh").write_text("".join(build))


def load_made_tasks(folder: Path) -> list[MadeTask]:
    """Read what ``write_folder`` wrote. Raises TaskError."""
    if not (folder / _TASKS).is_file():
        raise TaskError(f"no made tasks: got={str(folder)!r} expected a folder with {_TASKS}")
    found = read_repository(folder / _REPOSITORY)
    lines = (folder / _TASKS).read_text().splitlines()
    return [_made_task(found, json.loads(line)) for line in lines]


def load_tasks(folder: Path) -> list[Task]:
    """Read the tasks in the form that an environment takes. Raises TaskError."""
    return [task.to_task() for task in load_made_tasks(folder)]


def _task_row(task: MadeTask) -> rows.JsonRow:
    return {
        "task_id": task.task_id,
        "name": task.repository.name,
        "version": task.repository.version,
        "path": task.path,
        "content": task.content.decode("utf-8"),
        "kind": task.kind,
        "function": task.function,
        "line": task.line,
        "failing": list(task.failing),
        "expected": dict(task.expected),
        "issue": task.issue,
    }


def _made_task(found: Repository, row: Mapping[str, Any]) -> MadeTask:
    repository = Repository(row["name"], row["version"], found.files)
    task = MadeTask(
        repository=repository,
        path=row["path"],
        content=row["content"].encode("utf-8"),
        kind=row["kind"],
        function=row["function"],
        line=row["line"],
        failing=tuple(row["failing"]),
        expected=row["expected"],
        issue=row["issue"],
    )
    if task.task_id != row["task_id"]:
        raise TaskError(f"a made task was changed: got={task.task_id} expected={row['task_id']}")
    return task


def _write_image(folder: Path, task: MadeTask, base: str) -> str:
    """Write Dockerfile and archives; returns the id of the one commit in the image's repository."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="testbed-") as scratch:
        commit = commit_tree(task.base_files, Path(scratch))
        exclude = Path(scratch, ".git", "info", "exclude")
        exclude.parent.mkdir(exist_ok=True)
        exclude.write_text(f".venv/\nrun_tests.sh\n{rows.R2E_FOLDER}\n__pycache__/\n")
        Path(scratch, "run_tests.sh").write_text(rows.run_tests_script(task))
        paths = sorted(path for path in Path(scratch).rglob("*") if path.is_file())
        content = {p.relative_to(scratch).as_posix(): p.read_bytes() for p in paths}
    (folder / "testbed.tar").write_bytes(pack(content))
    (folder / "r2e_tests.tar").write_bytes(pack(rows.r2e_tests(task)))
    (folder / "Dockerfile").write_text(_DOCKERFILE.format(base=base))
    return commit
