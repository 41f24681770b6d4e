"""SWE-bench rows as tasks to train on: what a row leaves out is taken from its image."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields, replace

from envs.errors import TaskError
from envs.images.task import ImageTask
from envs.sandbox.docker.docker_sandbox import DockerSandbox
from envs.sandbox.docker.host import DockerHost
from envs.sandbox.docker.options import DockerOptions
from envs.tasks.swebench import (
    REPOSITORY,
    SweBenchRow,
    load_rows,
    official_test_files,
    training_task,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SweBenchTask(ImageTask):
    """A task that still needs ``complete``: the judged files are made in its image."""

    row: SweBenchRow | None = None


def load_tasks(source: str, split: str = "test") -> list[ImageTask]:
    """Read rows that can give training rewards, see ``training_task``; the log counts the others.

    Raises TaskError when none can, or when the rows cannot be read."""
    tasks: list[ImageTask] = []
    refused: list[str] = []
    for row in load_rows(source, split):
        try:
            task = training_task(row, row.image)
        except TaskError as error:
            refused.append(str(error))
            continue
        values = {item.name: getattr(task, item.name) for item in fields(task)}
        tasks.append(SweBenchTask(**values, row=row))
    if not tasks:
        reason = refused[0] if refused else "there are no rows"
        raise TaskError(f"{source}: no row can be trained on: got={reason}")
    if refused:
        log.warning("%d rows of %s are not used; the first: %s", len(refused), source, refused[0])
    return tasks


def complete(task: ImageTask, host: DockerHost, options: DockerOptions) -> ImageTask:
    """Return the task with its judged files in the plan. Raises TaskError, DockerErrors."""
    if not isinstance(task, SweBenchTask) or task.row is None:
        return task
    inside = replace(options, workspace=REPOSITORY, network="none")
    sandbox = DockerSandbox.start(host, task.image, inside)
    try:
        files = official_test_files(sandbox, task.row)
    finally:
        sandbox.close()
    return training_task(task.row, task.image, files)
