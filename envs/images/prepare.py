"""Preparation that makes an image safe to show to an agent, once, and keeps the result as an image.

Hidden files are removed, the history ends at the base commit and is probed, and the work tree is
recorded for the patch. Every episode then starts from the kept image at the price of a container.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from dataclasses import dataclass

from envs.errors import TaskError
from envs.images.task import ImageTask
from envs.patches.git_history import hide_future
from envs.patches.git_patch import Baseline, take_baseline
from envs.sandbox.docker.docker_errors import DockerError, ImageMissingError
from envs.sandbox.docker.docker_sandbox import DockerSandbox
from envs.sandbox.docker.engine import Engine
from envs.sandbox.docker.host import DockerHost
from envs.sandbox.docker.options import DockerOptions

log = logging.getLogger(__name__)

_RECIPE = "2"  # goes up when prepared images must be made anew
PREPARED_LABEL = "agent-rl.baseline"  # its value is the tree that patches are taken against
_REPOSITORY = "agent-rl/prepared"
_STORE = "/var/lib/agent-rl/base.git"
_HIDE_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class PreparedImage:
    """An image to start episodes from, and the work tree that patches are taken against."""

    name: str
    baseline: Baseline


class ImagePreparer:
    """A preparer of images for one host.

    Thread-safe; an image is prepared once however many ask.
    """

    def __init__(self, host: DockerHost, options: DockerOptions) -> None:
        self._host, self._options = host, options
        self._guard = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}

    def prepare(self, task: ImageTask) -> PreparedImage:
        """Return the prepared image of a task, made if need be.

        Raises HistoryLeakError when the fix can still be read afterwards, TaskError when the image
        does not have the layout, and DockerErrors.
        """
        source = self._host.backoff.run(lambda: self._host.engine.find_image(task.image))
        if source is None:
            source = self._host.prepare_images([task.image])[task.image]
        recipe = [
            _RECIPE, source.image_id, task.repository, task.base, self._options.user,
            sorted(task.hidden_paths), sorted(task.fix_ids),
        ]  # fmt: skip
        digest = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:24]
        name = f"{_REPOSITORY}:{digest}"
        with self._guard:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:
            found = self._host.engine.find_image(name)
            if found is not None and PREPARED_LABEL in found.labels:
                tree = found.labels[PREPARED_LABEL]
                return PreparedImage(name, Baseline(task.repository, _STORE, tree))
            return self._make(task, name)

    def _make(self, task: ImageTask, name: str) -> PreparedImage:
        sandbox = DockerSandbox.start(self._host, task.image, self._options)
        try:
            hide_paths(sandbox, task.hidden_paths)
            hide_future(sandbox, task.repository, task.base, task.fix_ids)
            baseline = take_baseline(sandbox, task.repository, _STORE)
            labels = {PREPARED_LABEL: baseline.tree}
            self._host.engine.commit(sandbox.container_id, name, labels)
        except ImageMissingError as error:
            raise TaskError(f"image {task.image} cannot be prepared: {error}") from error
        finally:
            sandbox.close()
        log.info("prepared %s from %s", name, task.image)
        return PreparedImage(name, baseline)


def remove_old_images(engine: Engine, max_kept: int) -> list[str]:
    """Remove prepared images, the oldest first, until ``max_kept`` are left on the engine.

    They are made again when they are needed. One that a container uses stays. Returns the names.
    """
    newest_first = sorted(
        engine.list_images(PREPARED_LABEL), key=lambda image: (image.created_s, image.name)
    )[::-1]
    removed: list[str] = []
    for image in newest_first[max_kept:]:
        try:
            engine.remove_image(image.name)
        except DockerError as error:
            log.info("prepared image %s stays: %s", image.name, error)
        else:
            removed.append(image.name)
    return removed


def hide_paths(sandbox: DockerSandbox, paths: tuple[str, ...]) -> None:
    """Remove files and folders, absolute paths. Raises TaskError when one stays."""
    if not paths:
        return
    script = (
        'rm -rf -- "$@"; for path in "$@"; do [ ! -e "$path" ] || { echo "$path"; exit 1; }; done'
    )
    result = sandbox.exec(["bash", "-c", script, "bash", *paths], timeout_s=_HIDE_TIMEOUT_S)
    if result.exit_code != 0:
        raise TaskError(
            f"hidden files stay readable: got={result.output[-300:]!r} expected=their removal"
        )
