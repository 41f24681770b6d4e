"""A container engine in memory, with failures on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from envs.sandbox.docker.docker_errors import ContainerGoneError, ImageMissingError
from envs.sandbox.docker.engine import (
    ContainerSpec,
    ContainerState,
    ContainerSummary,
    EngineInfo,
    ExecStream,
    ImageInfo,
    ImageSummary,
)


@dataclass
class FakeEngine:
    """``failures[name]`` is a queue: None lets the call through, an exception is raised instead.

    An exception queued for ``create:after`` is raised once the container has been made, as when an
    answer is lost.
    """

    images: dict[str, ImageInfo] = field(default_factory=dict)
    registry: set[str] = field(default_factory=set)
    containers: dict[str, ContainerSpec] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)
    volumes: set[str] = field(default_factory=set)
    failures: dict[str, list[BaseException | None]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    on_call: Callable[[str], None] = lambda name: None
    closed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _made: int = 0

    def _enter(self, name: str) -> None:
        self.on_call(name)
        with self._lock:
            self.calls.append(name)
            queue = self.failures.get(name, [])
            failure = queue.pop(0) if queue else None
        if failure is not None:
            raise failure

    def info(self) -> EngineInfo:
        self._enter("info")
        return EngineInfo("/data", "x86_64")

    def find_image(self, image: str) -> ImageInfo | None:
        self._enter("find_image")
        return self.images.get(image)

    def pull(self, image: str) -> None:
        self._enter("pull")
        if image not in self.registry:
            raise ImageMissingError(f"no such image: got={image}")
        self.images[image] = ImageInfo(f"sha256:{image}", "amd64")

    def commit(self, container_id: str, image: str, labels: Mapping[str, str]) -> None:
        self._enter("commit")
        self.images[image] = ImageInfo(f"sha256:{image}", "amd64", labels)

    def remove_image(self, image: str) -> None:
        self._enter("remove_image")
        self.images.pop(image, None)

    def list_images(self, label: str) -> list[ImageSummary]:
        self._enter("list_images")
        return [
            ImageSummary(name, float(number))
            for number, (name, image) in enumerate(self.images.items())
            if label in image.labels
        ]

    def create(self, spec: ContainerSpec) -> str:
        self._enter("create")
        with self._lock:
            self._made += 1
            container_id = f"{self._made:064x}"
            self.containers[container_id] = spec
            self.volumes.add(f"anonymous of {container_id}")
        self._enter("create:after")
        return container_id

    def start(self, container_id: str) -> None:
        self._enter("start")
        if container_id not in self.containers:
            raise ContainerGoneError("no such container")
        self.running.add(container_id)

    def state(self, container_id: str) -> ContainerState:
        self._enter("state")
        if container_id not in self.containers:
            raise ContainerGoneError("no such container")
        return ContainerState(container_id in self.running, 0, False)

    def kill(self, container_id: str) -> None:
        self._enter("kill")
        self.running.discard(container_id)

    def remove(self, container_id: str) -> None:
        self._enter("remove")
        with self._lock:
            self.containers.pop(container_id, None)
            self.running.discard(container_id)
            self.volumes.discard(f"anonymous of {container_id}")

    def list_containers(self, label: str) -> list[ContainerSummary]:
        self._enter("list_containers")
        key, _, value = label.partition("=")
        return [
            ContainerSummary(container_id, spec.labels)
            for container_id, spec in self.containers.items()
            if key in spec.labels and (not value or spec.labels[key] == value)
        ]

    def open_exec(
        self,
        container_id: str,
        argv: Sequence[str],
        *,
        stdin: bool,
        user: str = "",
        cwd: str = "",
        env: Mapping[str, str] | None = None,
    ) -> ExecStream:
        self._enter("open_exec")
        raise ContainerGoneError("nothing runs in memory")

    def count_processes(self, container_id: str) -> int:
        self._enter("count_processes")
        return 1

    def added_bytes(self, container_id: str) -> int:
        self._enter("added_bytes")
        return 0

    def put_archive(self, container_id: str, folder: str, data: bytes) -> None:
        self._enter("put_archive")

    def get_archive(self, container_id: str, path: str, max_bytes: int) -> bytes:
        self._enter("get_archive")
        raise FileNotFoundError(path)

    def close(self) -> None:
        self.closed = True
