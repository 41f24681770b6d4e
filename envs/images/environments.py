"""The parts that image tasks of one run share, from settings to environments."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from envs.actions import FORMATS, TOOL_SETS
from envs.actions.container_tools import ToolSettings
from envs.base import Task
from envs.errors import TaskError
from envs.images.env import ImageEnv, ImageEnvParts
from envs.images.grading import GradingPolicy, ImageGrader, Validation
from envs.images.prepare import ImagePreparer, remove_old_images
from envs.images.task import ImageTask
from envs.images.validation import ValidationCache
from envs.sandbox.docker.docker_errors import DockerError
from envs.sandbox.docker.engine import Engine
from envs.sandbox.docker.host import DockerHost, HostLimits
from envs.sandbox.docker.options import DockerOptions

log = logging.getLogger(__name__)
Complete = Callable[[ImageTask, DockerHost, DockerOptions], ImageTask]


@dataclass(frozen=True)
class ImageSettings:
    """Settings of image tasks; ``action_format`` and ``tool_set`` are keys of ``envs.actions``."""

    run_id: str
    validations: Path  # folder of remembered verdicts, shared by runs
    action_format: str = "r2e_xml"
    tool_set: str = "r2e"
    options: DockerOptions = field(default_factory=DockerOptions)
    host_limits: HostLimits = field(default_factory=HostLimits)
    policy: GradingPolicy = field(default_factory=GradingPolicy)
    tool_settings: ToolSettings = field(default_factory=ToolSettings)
    max_prepared: int = 500  # prepared images that stay on the engine after ``close``


@dataclass(frozen=True)
class Checked:
    """Tasks that may be used, and why the others may not."""

    usable: tuple[ImageTask, ...]
    refused: tuple[tuple[str, str], ...]  # task id, reason


class ImageEnvironments:
    """A maker of environments; owns the host and its containers.

    Example:
        >>> shared = ImageEnvironments(DockerPyEngine(), ImageSettings("run-7", Path("validated")))
        >>> tasks = shared.check(load_tasks("rows.jsonl")).usable
        >>> env = shared.make(tasks[0])
    """

    def __init__(self, engine: Engine, settings: ImageSettings) -> None:
        """Remove what an earlier, killed process of the same run left. Raises DockerErrors."""
        self._max_prepared = settings.max_prepared
        self._host = DockerHost(engine, settings.run_id, settings.host_limits)
        removed = self._host.clean_up()
        if removed:
            log.warning("removed %d containers that a killed process left behind", len(removed))
        self._cache = ValidationCache(settings.validations)
        self._validations: dict[str, Validation] = {}
        self._grader = ImageGrader(self._host, settings.options, settings.policy)
        self._parts = ImageEnvParts(
            self._host,
            settings.options,
            ImagePreparer(self._host, settings.options),
            self._grader,
            FORMATS[settings.action_format](),
            TOOL_SETS[settings.tool_set],
            settings.tool_settings,
        )

    def check(
        self,
        tasks: Sequence[ImageTask],
        *,
        num_workers: int = 2,
        complete: Complete | None = None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Checked:
        """Have every image here, prepare it and validate its task; verdicts are remembered.

        ``complete`` adds to a task what only its image knows; the completed ones are returned.
        Raises DockerErrors: an image that cannot be had stops the run before it starts.
        """
        images = self._host.prepare_images(task.image for task in tasks)
        checked: list[ImageTask | str] = []
        with ThreadPoolExecutor(num_workers) as pool:
            futures = [
                pool.submit(self._check_one, task, images[task.image].image_id, complete)
                for task in tasks
            ]
            for future in futures:
                checked.append(future.result())
                on_progress(len(checked), len(tasks))
        pairs = list(zip(tasks, checked, strict=True))
        return Checked(
            tuple(found for found in checked if isinstance(found, ImageTask)),
            tuple((task.task_id, found) for task, found in pairs if isinstance(found, str)),
        )

    def _check_one(
        self, task: ImageTask, image_id: str, complete: Complete | None
    ) -> ImageTask | str:
        """Return the task if it may be used, else the reason why not."""
        try:
            if complete is not None:
                task = complete(task, self._host, self._parts.options)
            self._parts.preparer.prepare(task)
            self._validations[task.task_id] = self._cache.check(task, self._grader, image_id)
        except TaskError as error:
            return str(error)
        return task

    def make(self, task: Task) -> ImageEnv:
        """Make an unstarted environment; does not block.

        Raises TaskError for other kinds of tasks.
        """
        if not isinstance(task, ImageTask):
            raise TaskError(f"task {task.task_id} is not in an image: expected=an ImageTask")
        return ImageEnv(task, self._parts, self._validations.get(task.task_id))

    def close(self) -> None:
        """Remove every container of this object, and prepared images above the limit.

        Raises DockerError naming the containers that stay.
        """
        try:
            remove_old_images(self._host.engine, self._max_prepared)
        except DockerError as error:
            log.error("prepared images could not be looked through: %s", error)
        self._host.close()
