"""Check what tasks with images need: rows, the daemon, images, disk, room for the containers."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

from agent_rl.config.schema import RunConfig
from agent_rl.doctor.check import Check, counted, gib
from agent_rl.errors import ConfigError
from agent_rl.tasks.images import ROWS
from agent_rl.tasks.kinds import load_tasks
from envs.errors import InfrastructureError
from envs.images.task import ImageTask
from envs.sandbox.docker.engine import Engine
from envs.sandbox.docker.host import free_bytes
from envs.tasks.r2e_gym import is_row_file

_START_DOCKER = "start Docker, or set images.docker_url or DOCKER_HOST"
_INSTALL_DATASETS = ".venv/bin/pip install -r requirements-eval.lock, or give a file"
_INSTALL_DOCKER = ".venv/bin/pip install -r requirements.lock"
_MAX_NAMED = 3


def check_images(config: RunConfig) -> Iterator[Check]:
    """Check the daemon and the images of the tasks in a file; no data set is fetched."""
    if config.tasks.kind not in ROWS:
        return
    tasks, finding = _rows(config)
    yield finding
    yield from _room(config)
    engine, finding = _connect(config)
    yield finding
    if engine is None:
        return
    try:
        yield from _daemon(config, engine, tasks)
    except InfrastructureError as error:
        yield Check("Docker daemon", "missing", str(error), _START_DOCKER)
    finally:
        engine.close()


def check_data_set(name: str, source: str) -> Check:
    """Check, as ``name``, that the rows of ``source``, which is no file, can be fetched."""
    if importlib.util.find_spec("datasets") is None:
        detail = f"{source} is no file, and the datasets package is not installed"
        return Check(name, "missing", detail, _INSTALL_DATASETS)
    detail = f"{source}: a data set, fetched when the run starts"
    return Check(name, "warning", detail, "give a file to have its rows checked here")


def _rows(config: RunConfig) -> tuple[list[ImageTask], Check]:
    """Read the tasks; what is wrong with them is told by a rule of the same name."""
    source = config.tasks.rows
    if not is_row_file(source):
        return [], check_data_set("tasks.rows", source)
    try:
        sets = load_tasks(config.tasks)
    except ConfigError as error:
        return [], Check("tasks.rows", "missing", str(error), "correct it")
    heldout = sets.heldout[: config.eval.num_tasks]
    tasks = [task for task in (*sets.train, *heldout) if isinstance(task, ImageTask)]
    detail = f"{counted(len(sets.train), 'task')} to train on, {len(heldout)} held out"
    return tasks, Check("tasks.rows", "ok", detail)


def _connect(config: RunConfig) -> tuple[Engine | None, Check]:
    if importlib.util.find_spec("docker") is None:
        detail = "the docker package is not installed"
        return None, Check("Docker daemon", "missing", detail, _INSTALL_DOCKER)
    from envs.sandbox.docker.docker_py import DockerPyEngine

    try:
        return DockerPyEngine(config.images.docker_url or None), Check("Docker daemon", "ok", "up")
    except InfrastructureError as error:
        return None, Check("Docker daemon", "missing", str(error), _START_DOCKER)


def _daemon(config: RunConfig, engine: Engine, tasks: list[ImageTask]) -> Iterator[Check]:
    info = engine.info()
    free, floor = free_bytes(info.data_root), config.images.disk_floor_bytes
    if free is None:
        yield Check("disk for images", "warning", "the daemon is on another machine", "look there")
    else:
        enough = free >= floor
        yield Check(
            "disk for images",
            "ok" if enough else "missing",
            f"{gib(free)} free below {info.data_root}, floor {gib(floor)}",
            "" if enough else "remove images, or move the daemon's data-root",
        )
    names = sorted({task.image for task in tasks})
    absent = [name for name in names if engine.find_image(name) is None]
    if not names:
        return
    if not absent:
        yield Check("images", "ok", f"{counted(len(names), 'image')}, none of them absent")
        return
    shown = ", ".join(absent[:_MAX_NAMED]) + (" …" if len(absent) > _MAX_NAMED else "")
    yield Check(
        "images",
        "warning" if config.images.pull else "missing",
        f"{len(absent)} of {counted(len(names), 'image')} not here: {shown}",
        "fetched when the run starts; make sure that they fit the disk"
        if config.images.pull
        else "build or load them, or set images.pull=true",
    )


def _room(config: RunConfig) -> Iterator[Check]:
    """Containers at their limits against this machine; the daemon may be on another one."""
    workers, images = config.sandbox.num_workers, config.images
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0))
    fits = workers * images.memory_bytes <= memory and workers * images.cpus <= 4 * cores
    yield Check(
        "sandbox workers",
        "ok" if fits else "warning",
        f"{counted(workers, 'container')} of up to {gib(images.memory_bytes)} and "
        f"{images.cpus:g} CPUs; {gib(memory)} and {counted(cores, 'core')} here",
        "" if fits else "lower sandbox.num_workers or images.memory_bytes, or a larger machine",
    )
