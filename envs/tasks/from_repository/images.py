"""Building of the images of made tasks, and validation of every task inside its own.

The tests were run in a sandbox with this machine's packages; an image may lack one of them, or have
another version. What fails there is taken out of the rows for images.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from envs.errors import InfrastructureError, TaskError
from envs.images.environments import ImageEnvironments, ImageSettings
from envs.sandbox.docker.engine import Engine
from envs.tasks import r2e_gym, swebench_images

_BUILD_TIMEOUT_S = 3600.0
_FILES = {"r2e_gym.jsonl": "docker_image", "swebench.jsonl": "image"}


@dataclass(frozen=True)
class ImageReport:
    """Tasks that hold in their images, and the refused ones: image to reason.

    A task holds when its gold patch earns the reward and its base does not."""

    kept: tuple[str, ...]
    refused: Mapping[str, str]


def check_images(
    out: Path,
    engine: Engine,
    settings: ImageSettings,
    *,
    docker_url: str = "",
    num_workers: int = 2,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> ImageReport:
    """Build the images of a folder that ``make_tasks`` wrote, and keep the rows that hold there.

    Rewrites ``r2e_gym.jsonl`` and ``swebench.jsonl``; adds the report to ``report.json``.

    Args:
        engine: validates; closed at the end. ``docker_url`` is its socket, for the ``docker``
            command that builds.

    Raises:
        TaskError: no made tasks. InfrastructureError: an image cannot be built.
    """
    _build(out, docker_url)
    shared = ImageEnvironments(engine, settings)
    refused: dict[str, str] = {}
    try:
        for tasks in (
            r2e_gym.load_tasks(str(out / "r2e_gym.jsonl")),
            swebench_images.load_tasks(str(out / "swebench.jsonl")),
        ):
            checked = shared.check(
                tasks,
                num_workers=num_workers,
                complete=swebench_images.complete,
                on_progress=on_progress,
            )
            images = {task.task_id: task.image for task in tasks}
            refused |= {images[task_id]: reason for task_id, reason in checked.refused}
    finally:
        shared.close()
    kept: list[str] = []
    for name, key in _FILES.items():
        rows = [json.loads(line) for line in (out / name).read_text().splitlines()]
        good = [row for row in rows if row[key] not in refused]
        kept = [str(row[key]) for row in good]
        (out / name).write_text("".join(f"{json.dumps(row)}\n" for row in good))
    report = ImageReport(tuple(kept), refused)
    _note(out / "report.json", report)
    return report


def _build(out: Path, docker_url: str) -> None:
    script = out / "images" / "build.sh"
    if not script.is_file():
        raise TaskError(f"no made tasks: got={str(out)!r} expected a folder with images/build.sh")
    environment = {**os.environ, "DOCKER_BUILDKIT": "0"}
    if docker_url:
        environment["DOCKER_HOST"] = docker_url
    try:
        done = subprocess.run(
            ["sh", str(script)],
            env=environment,
            capture_output=True,
            timeout=_BUILD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise InfrastructureError(f"images are not built after {_BUILD_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        raise InfrastructureError(
            f"an image cannot be built: got={done.stderr[-1000:].decode('utf-8', 'replace')}"
            " expected the base image with git, python3 and what requirements.txt says"
        )


def _note(file: Path, report: ImageReport) -> None:
    known: dict[str, object] = {}
    if file.is_file():
        known = cast("dict[str, object]", json.loads(file.read_text()))
    known["images"] = {"kept": len(report.kept), "refused": dict(report.refused)}
    file.write_text(json.dumps(known, indent=2) + "\n")
