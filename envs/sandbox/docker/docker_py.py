# pyright: basic
"""The engine over the Docker API, by docker-py. Podman's service answers the same API.

The one file that knows docker-py, which ships without types; nothing of it leaves here.
"""

from __future__ import annotations

import errno
import os
import select
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import docker
import requests
from docker import errors as docker_errors
from docker.types import Ulimit
from docker.utils import parse_repository_tag

from envs.sandbox.docker.docker_errors import (
    ArchiveTooLargeError,
    ContainerGoneError,
    DiskLowError,
    DockerError,
    ImageMissingError,
    TransientDockerError,
)
from envs.sandbox.docker.engine import (
    ContainerSpec,
    ContainerState,
    ContainerSummary,
    EngineInfo,
    ImageInfo,
    ImageSummary,
)
from envs.sandbox.docker.frames import FrameReader
from envs.sandbox.docker.guest_shell import INIT

_NO_SPACE = "no space left on device"


class DockerPyEngine:
    """A Docker or Podman service. ``url`` is its socket, None takes ``DOCKER_HOST``.

    Example:
        >>> DockerPyEngine("unix:///run/podman/podman.sock")  # doctest: +SKIP
    """

    def __init__(self, url: str | None = None, *, timeout_s: int = 120) -> None:
        where = url or os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
        _check_socket(where)
        with _translated(f"connect to {where}"):
            if url:
                self._client = docker.DockerClient(base_url=url, timeout=timeout_s, version="auto")
            else:
                self._client = docker.from_env(timeout=timeout_s, version="auto")
        self._api = self._client.api

    def info(self) -> EngineInfo:
        with _translated("ask for the engine's details"):
            info = self._api.info()
        return EngineInfo(info["DockerRootDir"], info["Architecture"])

    def find_image(self, image: str) -> ImageInfo | None:
        try:
            with _translated(f"look for image {image}"):
                found = self._api.inspect_image(image)
        except (ImageMissingError, ContainerGoneError):
            return None
        labels = (found.get("Config") or {}).get("Labels") or {}
        return ImageInfo(found["Id"], found.get("Architecture", ""), labels)

    def pull(self, image: str) -> None:
        repository, tag = parse_repository_tag(image)
        with _translated(f"pull image {image}"):
            for line in self._api.pull(repository, tag=tag or "latest", stream=True, decode=True):
                if "error" in line:
                    raise _error_of_text(f"pull image {image}", str(line["error"]))

    def commit(self, container_id: str, image: str, labels: Mapping[str, str]) -> None:
        repository, tag = parse_repository_tag(image)
        # Changes replace what the container was started with, which is this package's own PID 1.
        conf = {"Labels": dict(labels), "Entrypoint": [], "Cmd": ["bash"]}
        with _translated(f"keep container {container_id[:12]} as {image}"):
            self._api.commit(container_id, repository, tag=tag, conf=conf)

    def remove_image(self, image: str) -> None:
        try:
            with _translated(f"remove image {image}"):
                self._api.remove_image(image)
        except (ImageMissingError, ContainerGoneError):
            return

    def list_images(self, label: str) -> list[ImageSummary]:
        with _translated("list images"):
            found = self._api.images(filters={"label": label})
        return [
            ImageSummary(name, float(entry["Created"]))
            for entry in found
            for name in entry.get("RepoTags") or ()
        ]

    def create(self, spec: ContainerSpec) -> str:
        options = spec.options
        host_config = self._api.create_host_config(
            network_mode=options.network,
            mem_limit=options.memory_bytes,
            memswap_limit=options.memory_bytes,
            pids_limit=options.max_processes,
            nano_cpus=int(options.cpus * 1e9),
            shm_size=options.shm_bytes,
            cap_drop=["ALL"],
            cap_add=list(options.capabilities),
            security_opt=["no-new-privileges"],
            ulimits=[
                Ulimit(name="fsize", soft=options.max_file_bytes, hard=options.max_file_bytes),
                Ulimit(name="nofile", soft=options.max_open_files, hard=options.max_open_files),
                Ulimit(name="core", soft=0, hard=0),
            ],
            log_config={"Type": "none"},
            runtime=options.runtime or None,
        )
        with _translated(f"create a container of {spec.image}"):
            return self._api.create_container(
                spec.image,
                command=["-c", INIT],
                entrypoint=["bash"],
                user=options.user or None,
                environment=dict(options.environment),
                working_dir="/",
                labels=dict(spec.labels),
                host_config=host_config,
                platform=options.platform or None,
            )["Id"]

    def start(self, container_id: str) -> None:
        with _translated(f"start container {container_id[:12]}"):
            self._api.start(container_id)

    def state(self, container_id: str) -> ContainerState:
        with _translated(f"inspect container {container_id[:12]}"):
            state = self._api.inspect_container(container_id)["State"]
        return ContainerState(state["Running"], state["ExitCode"], state.get("OOMKilled", False))

    def kill(self, container_id: str) -> None:
        try:
            with _translated(f"kill container {container_id[:12]}"):
                self._api.kill(container_id)
        except _NotRunningError:
            return

    def remove(self, container_id: str) -> None:
        try:
            with _translated(f"remove container {container_id[:12]}"):
                self._api.remove_container(container_id, v=True, force=True)
        except (ContainerGoneError, _RemovalInProgressError):
            return

    def list_containers(self, label: str) -> list[ContainerSummary]:
        with _translated("list containers"):
            found = self._api.containers(all=True, filters={"label": label})
        return [ContainerSummary(entry["Id"], entry.get("Labels") or {}) for entry in found]

    def count_volumes(self) -> int:
        """Count the volumes of the engine, whoever made them."""
        with _translated("list volumes"):
            return len(self._api.volumes()["Volumes"] or ())

    def open_exec(
        self,
        container_id: str,
        argv: Sequence[str],
        *,
        stdin: bool,
        user: str = "",
        cwd: str = "",
        env: Mapping[str, str] | None = None,
    ) -> DockerPyStream:
        with _translated(f"open a command in container {container_id[:12]}"):
            exec_id = self._api.exec_create(
                container_id,
                list(argv),
                stdin=stdin,
                user=user,
                workdir=cwd or None,
                environment=dict(env or {}),
            )["Id"]
            opened = self._api.exec_start(exec_id, socket=True)
        return DockerPyStream(self._api, exec_id, opened)

    def count_processes(self, container_id: str) -> int:
        try:
            with _translated(f"list processes of container {container_id[:12]}"):
                return len(self._api.top(container_id)["Processes"] or ())
        except _NotRunningError:
            return 0

    def added_bytes(self, container_id: str) -> int:
        with _translated(f"measure container {container_id[:12]}"):
            found = self._api.containers(all=True, size=True, filters={"id": container_id})
        return found[0].get("SizeRw") or 0 if found else 0

    def put_archive(self, container_id: str, folder: str, data: bytes) -> None:
        with _translated(f"copy into container {container_id[:12]}"):
            self._api.put_archive(container_id, folder, data)

    def get_archive(self, container_id: str, path: str, max_bytes: int) -> bytes:
        parts: list[bytes] = []
        total = 0
        try:
            with _translated(f"copy out of container {container_id[:12]}"):
                stream, _ = self._api.get_archive(container_id, path)
                for part in stream:
                    total += len(part)
                    if total > max_bytes:
                        raise ArchiveTooLargeError(
                            f"{path} is too large: got>{total} expected<={max_bytes} bytes"
                        )
                    parts.append(part)
        except ContainerGoneError as error:
            if not self._exists(container_id):
                raise
            raise FileNotFoundError(f"no such path in the container: got={path}") from error
        return b"".join(parts)

    def _exists(self, container_id: str) -> bool:
        try:
            self.state(container_id)
        except ContainerGoneError:
            return False
        return True

    def close(self) -> None:
        self._client.close()


class DockerPyStream:
    """Both directions of one command, over the connection that the engine hijacked for it."""

    def __init__(self, api: Any, exec_id: str, opened: Any) -> None:
        self._api = api
        self._exec_id = exec_id
        self._opened = opened  # owns the connection; the socket dies with it
        self._socket: socket.socket = getattr(opened, "_sock", opened)
        self._frames = FrameReader()

    def send(self, data: bytes) -> None:
        try:
            self._socket.settimeout(60.0)
            self._socket.sendall(data)
        except OSError as error:
            raise ContainerGoneError(
                f"the command's input is closed: got={error} expected=an open connection"
            ) from error

    def receive(self, timeout_s: float) -> bytes | None:
        if not select.select([self._socket], [], [], max(0.0, timeout_s))[0]:
            return None
        try:
            data = self._socket.recv(1 << 18)
        except ConnectionError:
            return b""
        if not data:
            return b""
        # A piece that held only part of a header carries no output yet; that is not the end.
        return b"".join(payload for _, payload in self._frames.feed(data)) or None

    def exit_code(self) -> int | None:
        with _translated("ask how a command ended"):
            answer = self._api.exec_inspect(self._exec_id)
        return None if answer["Running"] else answer["ExitCode"]

    def close(self) -> None:
        # The response first: it flushes what it wraps, and what it wraps must still be open.
        for part in (getattr(self._opened, "_response", None), self._opened, self._socket):
            if part is not None:
                part.close()


def _check_socket(url: str) -> None:
    """Raise unless somebody listens: docker-py forgets to close its socket when nobody does."""
    scheme, _, path = url.partition("://")
    if scheme not in ("unix", "http+unix"):
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError as error:
            raise TransientDockerError(
                f"cannot connect to {url}: got={error} expected=a container engine that answers;"
                " start one, or set DOCKER_HOST"
            ) from error


class _NotRunningError(DockerError):
    """A container that is stopped."""


class _RemovalInProgressError(DockerError):
    """A container that somebody else is removing at this moment."""


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """Turn what docker-py raises into this package's errors."""
    try:
        yield
    except docker_errors.APIError as error:
        raise _error_of_status(what, error) from error
    except docker_errors.DockerException as error:
        raise TransientDockerError(
            f"cannot {what}: got={error} expected=a container engine that answers;"
            " start one, or set DOCKER_HOST"
        ) from error
    except (requests.exceptions.RequestException, TimeoutError) as error:
        raise TransientDockerError(
            f"cannot {what}: got={type(error).__name__}: {error} expected=an answer in time"
        ) from error
    except OSError as error:
        kind = DiskLowError if error.errno == errno.ENOSPC else TransientDockerError
        raise kind(f"cannot {what}: got={error}") from error


def _error_of_status(what: str, error: docker_errors.APIError) -> DockerError:
    status = error.status_code or 500
    text = str(error.explanation or error)
    if status == 404:
        image = "image" in what or "image" in text.lower()
        kind = ImageMissingError if image and "container " not in text else ContainerGoneError
        return kind(f"cannot {what}: got=404 {text}")
    if status == 409 and "is already in progress" in text:
        return _RemovalInProgressError(f"cannot {what}: got={text}")
    if status == 409 or "is not running" in text:
        return _NotRunningError(f"cannot {what}: got={status} {text} expected=a running container")
    if status == 429 or status >= 500:
        return _error_of_text(what, text)
    return DockerError(f"cannot {what}: got={status} {text}")


def _error_of_text(what: str, text: str) -> DockerError:
    lowered = text.lower()
    if _NO_SPACE in lowered:
        return DiskLowError(f"cannot {what}: got={text} expected=room on the engine's disk")
    if any(words in lowered for words in ("not found", "manifest unknown", "does not exist")):
        return ImageMissingError(f"cannot {what}: got={text} expected=an image that exists")
    return TransientDockerError(f"cannot {what}: got={text}")
