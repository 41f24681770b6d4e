"""The protocol of a container engine, no wider than the sandbox needs.

``docker_py.py`` implements it over the Docker API (Docker, Podman); tests implement it in memory.
Every method raises a ``DockerError``; one that may pass by itself is a ``TransientDockerError``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from envs.sandbox.docker.options import DockerOptions


@dataclass(frozen=True)
class EngineInfo:
    """The engine's description of itself. ``data_root`` is a path of the engine's own machine."""

    data_root: str
    architecture: str  # for example "x86_64"


@dataclass(frozen=True)
class ImageInfo:
    """An image that is here. ``architecture`` in the registry's words, for example "amd64"."""

    image_id: str
    architecture: str
    labels: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class ImageSummary:
    """A line of the engine's list of images: one name of one image."""

    name: str
    created_s: float  # since the epoch


@dataclass(frozen=True)
class ContainerSpec:
    """One container to make."""

    image: str
    options: DockerOptions
    labels: Mapping[str, str]


@dataclass(frozen=True)
class ContainerState:
    """The state of a container: running, or ended in some way."""

    running: bool
    exit_code: int
    oom_killed: bool


@dataclass(frozen=True)
class ContainerSummary:
    """A line of the engine's list."""

    container_id: str
    labels: Mapping[str, str]


class ExecStream(Protocol):
    """Both directions of one command inside a container."""

    def send(self, data: bytes) -> None:
        """Send all of it. Raises ContainerGoneError when the other end is closed."""
        ...

    def receive(self, timeout_s: float) -> bytes | None:
        """Return some output, both streams in one.

        None when nothing came in time, b"" at the end.
        """
        ...

    def exit_code(self) -> int | None:
        """Return the exit code that the engine saw, which nothing inside can forge.

        None while it runs.
        """
        ...

    def close(self) -> None: ...


class Engine(Protocol):
    """A container engine."""

    def info(self) -> EngineInfo: ...

    def find_image(self, image: str) -> ImageInfo | None:
        """Return the image if it is here; nothing is fetched."""
        ...

    def pull(self, image: str) -> None: ...

    def commit(self, container_id: str, image: str, labels: Mapping[str, str]) -> None:
        """Keep a container's files as an image with this name."""
        ...

    def remove_image(self, image: str) -> None:
        """Remove the name, and the image when it was its last. Already gone is fine.

        Raises DockerError while a container uses it.
        """
        ...

    def list_images(self, label: str) -> list[ImageSummary]:
        """List every name of every image with the label."""
        ...

    def create(self, spec: ContainerSpec) -> str: ...

    def start(self, container_id: str) -> None: ...

    def state(self, container_id: str) -> ContainerState: ...

    def kill(self, container_id: str) -> None:
        """End every process of the container. Already stopped is fine."""
        ...

    def remove(self, container_id: str) -> None:
        """Remove it with its anonymous volumes, running or not. Already gone is fine."""
        ...

    def list_containers(self, label: str) -> list[ContainerSummary]:
        """List every container with the label, stopped ones too."""
        ...

    def open_exec(
        self,
        container_id: str,
        argv: Sequence[str],
        *,
        stdin: bool,
        user: str = "",
        cwd: str = "",
        env: Mapping[str, str] | None = None,
    ) -> ExecStream: ...

    def count_processes(self, container_id: str) -> int:
        """Count the processes of a running container as the host sees them, PID 1 included."""
        ...

    def added_bytes(self, container_id: str) -> int:
        """Return the number of bytes that the container has added to its image."""
        ...

    def put_archive(self, container_id: str, folder: str, data: bytes) -> None:
        """Unpack a tar archive into ``folder``, which exists."""
        ...

    def get_archive(self, container_id: str, path: str, max_bytes: int) -> bytes:
        """Return ``path`` as a tar archive.

        Raises FileNotFoundError; ArchiveTooLargeError above ``max_bytes``.
        """
        ...

    def close(self) -> None: ...
