"""Tasks whose repositories are in container images, from rows in a file to validated tasks."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from agent_rl.config.schema import ImagesConfig, RunConfig, TasksConfig
from agent_rl.errors import ConfigError
from agent_rl.tasks.task_kind import Environments, TaskSets, tool_prompts
from envs.actions import TOOL_SETS, Prompts
from envs.actions.container_tools import ToolSettings
from envs.base import Task
from envs.errors import TaskError
from envs.images.environments import ImageEnvironments, ImageSettings
from envs.images.task import ImageTask
from envs.sandbox.docker.host import HostLimits
from envs.sandbox.docker.options import DockerOptions
from envs.tasks import r2e_gym, swebench_images

log = logging.getLogger(__name__)
WORKSPACE = r2e_gym.REPOSITORY  # SWE-bench's images have the same
ROWS: dict[str, Callable[[str, str], Sequence[ImageTask]]] = {
    "r2e_gym": r2e_gym.load_tasks,
    "swebench": swebench_images.load_tasks,
}


def episode_prompts(config: RunConfig, issue: str = "") -> Prompts:
    """Return the configured prompts with the tools of the container."""
    return tool_prompts(config, issue, TOOL_SETS[config.agent.tools], WORKSPACE)


def load_tasks(config: TasksConfig) -> TaskSets:
    """Read the rows and divide them. No daemon is asked.

    Raises ConfigError: the rows cannot be read, or a split has no task.
    """
    try:
        tasks = ROWS[config.kind](config.rows, config.rows_split)
    except TaskError as error:
        raise ConfigError([f"tasks.rows: {error}"]) from error
    sides = _divide(_in_drawn_order(tasks, config.seed), config.heldout_fraction)
    if not sides["train"] or not sides[config.heldout_split]:
        raise _empty_split(config, sides)
    heldout = sides[config.heldout_split]
    return TaskSets(sides["train"][: config.num_train], heldout[: config.num_heldout])


def _divide(tasks: Sequence[ImageTask], heldout_fraction: float) -> dict[str, list[ImageTask]]:
    sides: dict[str, list[ImageTask]] = {"train": [], "heldout": [], "confirm": []}
    for task in tasks:
        sides[side_of(task.task_id, heldout_fraction)].append(task)
    return sides


def _empty_split(config: TasksConfig, sides: dict[str, list[ImageTask]]) -> ConfigError:
    """Name the empty split, what the rows hold, and a change that leaves no split empty."""
    needed = ("train", config.heldout_split)
    tasks = [task for side in sides.values() for task in side]
    counts = ", ".join(f"{side} {len(members)}" for side, members in sides.items())
    fault = (
        f"tasks.rows: no task for the split {' and '.join(s for s in needed if not sides[s])}: "
        f"got {len(tasks)} tasks from {config.rows}, divided by "
        f"tasks.heldout_fraction={config.heldout_fraction} into {counts}; expected at least one "
        f"each for {' and '.join(needed)}"
    )
    if len(tasks) < len(needed):
        return ConfigError([f"{fault}; add rows to {config.rows}, or set tasks.rows"])
    # The ids decide what a fraction does, so each is tried; the nearest that works is told.
    fractions = sorted(
        (n / 100 for n in range(1, 50)), key=lambda f: abs(f - config.heldout_fraction)
    )
    for fraction in fractions:
        divided = _divide(tasks, fraction)
        if all(divided[side] for side in needed):
            remedy = f"set tasks.heldout_fraction={fraction}, or add rows"
            return ConfigError([f"{fault}; {remedy}"])
    return ConfigError([f"{fault}; add rows: no tasks.heldout_fraction divides these few"])


def side_of(task_id: str, heldout_fraction: float) -> str:
    """Return the side of a row by its id alone, so that it does not depend on other rows."""
    share = int(hashlib.sha256(task_id.encode()).hexdigest()[:12], 16) / 16**12
    if share < heldout_fraction:
        return "heldout"
    return "confirm" if share < 2 * heldout_fraction else "train"


def _in_drawn_order(tasks: Sequence[ImageTask], seed: int) -> list[ImageTask]:
    """Order tasks whatever order the file has. Raises ConfigError for an id that is there twice."""
    by_id = {task.task_id: task for task in tasks}
    if len(by_id) < len(tasks):
        ids = [task.task_id for task in tasks]
        twice = sorted({task_id for task_id in ids if ids.count(task_id) > 1})
        raise ConfigError([f"tasks.rows: got the same task twice: {twice[:5]}"])
    keys = {key: hashlib.sha256(f"{seed}/{key}".encode()).hexdigest() for key in by_id}
    return [by_id[key] for key in sorted(by_id, key=keys.__getitem__)]


def run_label(config: RunConfig) -> str:
    """Return the label of this run's containers; runs of one name in two folders stay apart."""
    root = hashlib.sha256(str(Path(config.run_root).resolve()).encode()).hexdigest()[:8]
    return f"{config.name}-{root}"


def image_settings(config: RunConfig) -> ImageSettings:
    """Turn ``config`` into the form that ``envs`` takes."""
    images = config.images
    folder = (
        Path(images.validations) if images.validations else Path(config.run_root, "validations")
    )
    return ImageSettings(
        run_id=run_label(config),
        validations=folder,
        action_format=config.agent.action_format,
        tool_set=config.agent.tools,
        options=_container_options(images),
        host_limits=HostLimits(
            max_containers=images.max_containers,
            max_starting=images.max_starting,
            max_pulls=images.max_pulls,
            disk_floor_bytes=images.disk_floor_bytes,
            allow_emulation=images.allow_emulation,
            pull=images.pull,
        ),
        tool_settings=ToolSettings(
            command_timeout_s=images.command_timeout_s,
            output_cap_bytes=images.output_cap_bytes,
            max_chars=images.max_chars,
        ),
        max_prepared=images.max_prepared,
    )


def _container_options(images: ImagesConfig) -> DockerOptions:
    return DockerOptions(
        workspace=WORKSPACE,
        user=images.user,
        network=images.network,
        memory_bytes=images.memory_bytes,
        max_processes=images.max_processes,
        cpus=images.cpus,
        disk_bytes=images.disk_bytes,
        max_file_bytes=images.max_file_bytes,
        shm_bytes=images.shm_bytes,
        runtime=images.runtime,
    )


def open_environments(config: RunConfig) -> Environments:
    """Connect to the daemon and remove what a killed process of this run left there.

    Raises DockerErrors, among them that no daemon answers.
    """
    from envs.sandbox.docker.docker_py import DockerPyEngine

    engine = DockerPyEngine(config.images.docker_url or None)
    shared = ImageEnvironments(engine, image_settings(config))

    def admit(tasks: Sequence[Task]) -> Sequence[Task]:
        return _admit(shared, tasks, config.images.num_validating)

    return Environments(shared.make, lambda: None, shared.close, "docker", admit)


def _admit(shared: ImageEnvironments, tasks: Sequence[Task], num_workers: int) -> Sequence[Task]:
    """Keep tasks whose gold patch earns the reward and whose base does not; log the others.

    Raises ConfigError when none is left, DockerErrors.
    """
    images = [task for task in tasks if isinstance(task, ImageTask)]
    checked = shared.check(images, num_workers=num_workers, complete=swebench_images.complete)
    for task_id, reason in checked.refused:
        log.warning("task %s is not used: %s", task_id, reason)
    if not checked.usable:
        reason = checked.refused[0][1] if checked.refused else "there are none"
        raise ConfigError([f"tasks.rows: none of {len(tasks)} tasks can be used: {reason}"])
    return checked.usable
