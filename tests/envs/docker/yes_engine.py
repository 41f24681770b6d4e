"""A container engine whose shell and commands all succeed, over what a test puts into it."""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fake_engine import FakeEngine

from envs.sandbox.docker.docker_sandbox import DockerSandbox
from envs.sandbox.docker.engine import ExecStream, ImageInfo
from envs.sandbox.docker.host import DockerHost
from envs.sandbox.docker.options import DockerOptions


class Shell:
    """A shell to which every script is a success without output; keeps what it was sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self._answer = b""

    def send(self, data: bytes) -> None:
        self.sent.append(data)
        self._answer += data.split(b" ", 1)[0] + b" 0 0 0\n"

    def receive(self, timeout_s: float) -> bytes | None:
        answer, self._answer = self._answer, b""
        return answer or None

    def exit_code(self) -> int | None:
        return 0

    def close(self) -> None:
        return None


@dataclass
class Command:
    """A command that ends with ``code``, or never when that is None."""

    code: int | None

    def send(self, data: bytes) -> None:
        raise AssertionError("no command here reads its input")

    def receive(self, timeout_s: float) -> bytes | None:
        if self.code is not None:
            return b""
        time.sleep(timeout_s)
        return None

    def exit_code(self) -> int | None:
        return self.code

    def close(self) -> None:
        return None


Act = Callable[[Mapping[str, str]], int | None]  # the environment to the exit code


@dataclass
class YesEngine(FakeEngine):
    """``folders``: what is below a path, or the failure to copy it. ``act`` carries out the
    commands that have no shell in front."""

    shell: Shell = field(default_factory=Shell)
    folders: dict[str, dict[str, bytes] | Exception] = field(default_factory=dict)
    act: Act = lambda env: 0
    added: int = 0

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
        if stdin:
            return self.shell
        return Command(0 if argv[0] == "bash" else self.act(env or {}))

    def added_bytes(self, container_id: str) -> int:
        return self.added

    def get_archive(self, container_id: str, path: str, max_bytes: int) -> bytes:
        found = self.folders.get(path, FileNotFoundError(path))
        if isinstance(found, Exception):
            raise found
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as archive:
            for name, content in found.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        return data.getvalue()


def make_engine() -> YesEngine:
    return YesEngine(images={"image": ImageInfo("sha256:1", "amd64")})


def make_box(engine: YesEngine, options: DockerOptions | None = None) -> DockerSandbox:
    host = DockerHost(engine, "run", free_bytes=lambda folder: 1 << 40)
    return DockerSandbox.start(host, "image", options or DockerOptions())
