"""One run's containers: made with labels, bounded in number, removed whatever happens."""

from __future__ import annotations

import logging
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from envs.sandbox.docker.docker_errors import DiskLowError, DockerError, ImageMissingError
from envs.sandbox.docker.engine import ContainerSpec, ContainerSummary, Engine, ImageInfo
from envs.sandbox.docker.options import DockerOptions
from envs.sandbox.docker.ownership import LABEL, Owner, make_labels, may_remove
from envs.sandbox.docker.retry import Backoff

log = logging.getLogger(__name__)
_REQUEST_LABEL = "agent-rl.request"
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


def free_bytes(folder: str) -> int | None:
    """Return the room on the disk that holds ``folder``; None where it is on another machine."""
    try:
        return shutil.disk_usage(folder).free
    except FileNotFoundError:
        return None


@dataclass(frozen=True)
class HostLimits:
    """Limits of what one run may take from the machine."""

    max_containers: int = 64  # alive at one time; a further start waits
    max_starting: int = 4  # being made at one time: daemons fall over under more
    max_pulls: int = 4
    disk_floor_bytes: int = 5 << 30  # free on the engine's disk, below it nothing new starts
    allow_emulation: bool = False  # images of another architecture run about 27 times slower
    pull: bool = True  # False: an image that is not here counts as one that cannot be had


@dataclass
class DockerHost:
    """The maker and remover of one run's containers. Thread-safe.

    Example:
        >>> host = DockerHost(DockerPyEngine(), run_id="run-7")
        >>> host.clean_up()  # what an earlier, killed process of this run left behind
        >>> host.prepare_images(["namanjain12/pandas_final:abc"])
        >>> sandbox = DockerSandbox.start(host, "namanjain12/pandas_final:abc", DockerOptions())
    """

    engine: Engine
    run_id: str
    limits: HostLimits = HostLimits()
    backoff: Backoff = field(default_factory=Backoff)
    owner: Owner = field(default_factory=Owner.current)
    free_bytes: Callable[[str], int | None] = free_bytes
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._alive: set[str] = set()
        self._stuck: set[str] = set()  # ours, no longer wanted, could not be removed yet
        self._room = threading.Semaphore(self.limits.max_containers)
        self._starting = threading.Semaphore(self.limits.max_starting)
        self._info = self.backoff.run(self.engine.info)

    @property
    def stuck(self) -> frozenset[str]:
        """Containers that could not be removed; every later start and ``close`` tries again."""
        with self._lock:
            return frozenset(self._stuck)

    def prepare_images(self, images: Iterable[str]) -> dict[str, ImageInfo]:
        """Have every image here before anything starts; images that are here are not pulled.

        Raises ImageMissingError naming every image that cannot be had, DockerError for one of
        another architecture, DiskLowError.
        """
        names = sorted(set(images))
        with ThreadPoolExecutor(self.limits.max_pulls) as pool:
            found = list(pool.map(self._find_or_pull, names))
        missing = [name for name, image in zip(names, found, strict=True) if image is None]
        if missing:
            raise ImageMissingError(
                f"images cannot be had: got={missing} expected=local images or names that the"
                " registry knows; check the data set's image column and the registry login"
            )
        return {name: image for name, image in zip(names, found, strict=True) if image is not None}

    def _find_or_pull(self, name: str) -> ImageInfo | None:
        image = self.backoff.run(lambda: self.engine.find_image(name))
        if image is None and self.limits.pull:
            self.check_disk()
            try:
                self.backoff.run(lambda: self.engine.pull(name))
            except ImageMissingError as error:
                log.error("%s", error)
                return None
            image = self.backoff.run(lambda: self.engine.find_image(name))
        if image is not None:
            self._check_architecture(name, image)
        return image

    def _check_architecture(self, name: str, image: ImageInfo) -> None:
        machine = _MACHINES.get(self._info.architecture, self._info.architecture)
        if image.architecture in ("", machine) or self.limits.allow_emulation:
            return
        raise DockerError(
            f"image {name} is for another architecture: got={image.architecture}"
            f" expected={machine}; emulation is so slow that tests run into their time limits."
            " Set allow_emulation to accept that"
        )

    def check_disk(self) -> None:
        """Raise DiskLowError when the engine's disk is below the floor."""
        free = self.free_bytes(self._info.data_root)
        if free is not None and free < self.limits.disk_floor_bytes:
            raise DiskLowError(
                f"the disk of {self._info.data_root} is nearly full: got={free} bytes free"
                f" expected>={self.limits.disk_floor_bytes}; remove images or raise the disk"
            )

    def start_container(self, image: str, options: DockerOptions) -> str:
        """Make and start a container; nothing of it is left when that fails.

        Waits while ``max_containers`` are alive. Raises a DockerError.
        """
        self._retry_stuck()
        self._room.acquire()
        try:
            with self._starting:
                self.check_disk()
                container_id = self._create(image, options)
        except BaseException:
            self._room.release()
            raise
        with self._lock:
            self._alive.add(container_id)
        try:
            self.backoff.run(lambda: self.engine.start(container_id))
        except BaseException:
            self.remove(container_id)
            raise
        return container_id

    def _create(self, image: str, options: DockerOptions) -> str:
        expires_at = self.clock() + options.max_lifetime_s
        labels = make_labels(self.run_id, self.owner, expires_at)

        def attempt() -> str:
            request = uuid.uuid4().hex
            spec = ContainerSpec(image, options, labels | {_REQUEST_LABEL: request})
            try:
                return self.engine.create(spec)
            except BaseException:
                # The answer may have been lost after the container was made: find it by label.
                self._remove_request(request)
                raise

        return self.backoff.run(attempt)

    def _remove_request(self, request: str) -> None:
        try:
            made = self.engine.list_containers(f"{_REQUEST_LABEL}={request}")
        except DockerError as error:
            log.error("cannot look for a half-made container: %s", error)
            return
        for container in made:
            self._remove_or_keep(container.container_id)

    def remove(self, container_id: str) -> None:
        """Remove a container of this run with its volumes. Never raises; see ``stuck``."""
        with self._lock:
            if container_id not in self._alive:
                return
            self._alive.remove(container_id)
        try:
            self._remove_or_keep(container_id)
        finally:
            self._room.release()

    def _remove_or_keep(self, container_id: str) -> bool:
        try:
            self.backoff.run(lambda: self.engine.remove(container_id))
        except DockerError as error:
            log.error("container %s could not be removed: %s", container_id[:12], error)
            with self._lock:
                self._stuck.add(container_id)
            return False
        with self._lock:
            self._stuck.discard(container_id)
        return True

    def _retry_stuck(self) -> None:
        for container_id in self.stuck:
            self._remove_or_keep(container_id)

    def clean_up(self, *, dead_owners: bool = False) -> list[str]:
        """Remove what killed processes of this run left behind, and what outlived its lifetime.

        Containers of other runs stay, see ``ownership.may_remove``. Returns the removed ids.
        Raises DockerError when one of them cannot be removed.
        """
        removed: list[str] = []
        for container in self._orphans(dead_owners):
            if not self._remove_or_keep(container.container_id):
                raise DockerError(
                    f"a left-over container cannot be removed: got={container.container_id}"
                    " expected=a successful removal; remove it by hand: docker rm -f -v"
                )
            removed.append(container.container_id)
        return removed

    def _orphans(self, dead_owners: bool) -> list[ContainerSummary]:
        now = self.clock()
        return [
            container
            for container in self.backoff.run(lambda: self.engine.list_containers(LABEL))
            if may_remove(container.labels, self.run_id, now, dead_owners=dead_owners)
        ]

    def close(self) -> None:
        """Remove every container of this object. Raises DockerError naming those that stay."""
        with self._lock:
            alive = list(self._alive)
        for container_id in alive:
            self.remove(container_id)
        self._retry_stuck()
        left = sorted(self.stuck)
        self.engine.close()
        if left:
            raise DockerError(
                f"containers could not be removed: got={left} expected=none;"
                " the next start of this run tries again"
            )
