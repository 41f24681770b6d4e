"""The Docker sandbox: one container and one persistent shell per episode."""

from __future__ import annotations

import logging
import posixpath
import shlex
import threading
import time
from collections.abc import Mapping, Sequence

from envs.base import ExecResult
from envs.sandbox import archives
from envs.sandbox.capture import CappedOutput
from envs.sandbox.docker import file_scripts, guest_shell
from envs.sandbox.docker.channel import Ending, ShellChannel
from envs.sandbox.docker.docker_errors import ContainerGoneError, DockerError
from envs.sandbox.docker.engine import ExecStream
from envs.sandbox.docker.host import DockerHost
from envs.sandbox.docker.options import DockerOptions

log = logging.getLogger(__name__)

_OPEN_S = 60.0
_FILE_S = 60.0
_KILL_S = 30.0
_TICK_S = 0.5  # between two looks at what a trusted command writes
_STATE_FILE = "/tmp/.agent-shell"
_SIGKILL_CODE = 137
_BROKEN_CODE = 126
_BROKEN = b"[the container no longer runs commands]\n"
_KILLED = b"\n[the shell was killed]\n"
_DISK_FULL = b"\n[stopped: the container wrote more than its disk limit]\n"
_FILE_CAP_BYTES = 256 << 20


class DockerSandbox:
    """A container as ``envs.base.Sandbox``; ``run_shell`` adds folder and environment that last.

    A command that kills its own shell, its container or the tools in it is the agent's doing: it
    gives a result, not an error. Only a container or an engine that went away without the agent's
    help raises InfrastructureError.
    """

    def __init__(self, host: DockerHost, container_id: str, options: DockerOptions) -> None:
        self._host = host
        self._engine = host.engine
        self._options = options
        self.container_id = container_id
        self._channel: ShellChannel | None = None
        self._lock = threading.Lock()  # one command at a time
        self._oom_kills = 0
        self._broken = False
        self._closed = False

    @classmethod
    def start(cls, host: DockerHost, image: str, options: DockerOptions) -> DockerSandbox:
        """Start a sandbox on a fresh container of ``image``. Raises a DockerError."""
        sandbox = cls(host, host.start_container(image, options), options)
        try:
            if not sandbox._open_channel():
                raise DockerError(
                    f"no shell starts in image {image}: expected=an image with bash and coreutils"
                )
            made = sandbox.exec(["mkdir", "-p", options.workspace], timeout_s=_OPEN_S, cwd="/")
            if made.exit_code != 0:
                raise DockerError(
                    f"the work folder cannot be made: got={made.output[-200:]!r}"
                    f" expected={options.workspace} to be writable by user {options.user!r}"
                )
        except BaseException:
            sandbox.close()
            raise
        return sandbox

    @property
    def workspace(self) -> str:
        return self._options.workspace

    def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        output_cap_bytes: int = 64 << 10,
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> ExecResult:
        """Run a command; see ``envs.base.Sandbox.exec``. ``cwd`` may be absolute here."""
        folder = posixpath.normpath(posixpath.join(self.workspace, cwd))
        lines = [f"cd -- {shlex.quote(folder)} 2>&1 || exit 125"]
        lines += [f"export {key}={shlex.quote(value)}" for key, value in (env or {}).items()]
        lines.append("exec " + shlex.join(argv))
        return self._run("\n".join(lines), timeout_s, output_cap_bytes, stdin)

    def run_shell(
        self, command: str, *, timeout_s: float, output_cap_bytes: int = 64 << 10
    ) -> ExecResult:
        """Run a bash command in the episode's shell.

        Folder, umask, exported variables and functions carry over to the next call, also when the
        command ends the shell by ``exit``; not after a deadline or ``exec``. Background processes
        do not live on.
        """
        words = ["bash", "--norc", "--noprofile", "-c", guest_shell.STATEFUL, "bash"]
        words += [_STATE_FILE, self.workspace, command]
        return self._run("exec " + shlex.join(words), timeout_s, output_cap_bytes, b"")

    def exec_trusted(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        output_cap_bytes: int = 1 << 20,
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        user: str = "",
    ) -> ExecResult:
        """Run a command as an exec of its own: the exit code is the engine's, not the shell's.

        Slower than ``exec``. Nothing inside the container can forge how it ended; what it wrote is
        as trustworthy as the command. ``user`` may be "root" in a container of another user.
        """
        with self._lock:
            self._check_open()
            return self._exec_trusted(argv, timeout_s, output_cap_bytes, cwd, env, user)

    def _exec_trusted(
        self,
        argv: Sequence[str],
        timeout_s: float,
        output_cap_bytes: int,
        cwd: str,
        env: Mapping[str, str] | None,
        user: str,
    ) -> ExecResult:
        started = time.monotonic()
        stream = self._engine.open_exec(
            self.container_id, argv, stdin=False, user=user, cwd=cwd or self.workspace, env=env
        )
        output = CappedOutput(output_cap_bytes)
        guard = _DiskGuard(self._host, self.container_id, self._options.disk_bytes)
        next_look = started + _TICK_S
        ended = False
        try:
            while not ended and (left := started + timeout_s - time.monotonic()) > 0:
                if time.monotonic() >= next_look:
                    if not guard.has_room():
                        output.add(_DISK_FULL)
                        break
                    next_look = time.monotonic() + _TICK_S
                data = stream.receive(min(left, _TICK_S))
                ended = data == b""
                output.add(data or b"")
            seconds = time.monotonic() - started
            code = stream.exit_code() if ended else None
        finally:
            stream.close()
        # What still runs, a daemon or the command itself, does not outlive the call.
        expected = 2 if self._channel else 1
        if not ended or self._engine.count_processes(self.container_id) > expected:
            self._drop_channel()
            self._kill_everything()
        return ExecResult(
            exit_code=_SIGKILL_CODE if guard.exceeded else code,
            output=output.value(),
            truncated=output.truncated,
            timed_out=not ended and not guard.exceeded,
            seconds=seconds,
        )

    def _run(self, script: str, timeout_s: float, cap: int, stdin: bytes) -> ExecResult:
        if why := guest_shell.unusable(script):
            return ExecResult(exit_code=_BROKEN_CODE, output=f"cannot run it: {why}\n".encode())
        with self._lock:
            self._check_open()
            if self._broken or not (self._channel or self._open_channel()):
                self._broken = True
                return ExecResult(exit_code=_BROKEN_CODE, output=_BROKEN)
            assert self._channel is not None
            output = CappedOutput(cap)
            started = time.monotonic()
            guard = _DiskGuard(self._host, self.container_id, self._options.disk_bytes)
            try:
                ending = self._channel.run(
                    script,
                    output,
                    deadline=started + timeout_s,
                    stdin=stdin,
                    may_go_on=guard.has_room,
                )
            except BaseException:
                self._drop_channel()  # the command may still run: the shell is out of step
                raise
            seconds = time.monotonic() - started
            if guard.exceeded:
                output.add(_DISK_FULL)
            return self._finish(ending, output, seconds, guard.exceeded)

    def _finish(
        self, ending: Ending, output: CappedOutput, seconds: float, disk_full: bool
    ) -> ExecResult:
        oom = ending.oom_kills > self._oom_kills
        self._oom_kills = max(self._oom_kills, ending.oom_kills)
        code = ending.exit_code
        if ending.how == "closed":
            output.add(_KILLED)
            code = _SIGKILL_CODE
            oom = self._engine.state(self.container_id).oom_killed
        if ending.how != "ended" or ending.left_behind:
            self._drop_channel()
            self._kill_everything()
        return ExecResult(
            exit_code=_SIGKILL_CODE if disk_full else code,
            output=output.value(),
            truncated=output.truncated,
            timed_out=ending.how == "deadline" and not disk_full,
            oom=oom,
            seconds=seconds,
        )

    def _open_channel(self) -> bool:
        """Open the shell; False when the container cannot run one."""
        argv = ["bash", "--norc", "--noprofile", "-c", guest_shell.SHELL]
        try:
            stream = self._engine.open_exec(
                self.container_id, argv, stdin=True, user=self._options.user, cwd="/"
            )
        except ContainerGoneError:
            raise
        except DockerError as error:
            if self._engine.state(self.container_id).running:
                log.warning("no shell in container %s: %s", self.container_id[:12], error)
                return False
            raise
        channel = ShellChannel(stream)
        ending = channel.run(":", CappedOutput(1 << 10), deadline=time.monotonic() + _OPEN_S)
        if ending.how != "ended":
            channel.close()
            return False
        self._oom_kills = ending.oom_kills
        self._channel = channel
        return True

    def _drop_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _kill_everything(self) -> None:
        """Leave nothing running but PID 1, and the container usable.

        First a signal to every process, which costs an exec. When that does not do (no process
        can be made, the tools are gone), the container is killed from outside and started again:
        its files stay.
        """
        if self._engine.state(self.container_id).running:
            try:
                stream = self._engine.open_exec(
                    self.container_id, ["bash", "-c", "kill -9 -1"], stdin=False, user="root"
                )
                _drain(stream, time.monotonic() + _KILL_S)
                if self._only_init_runs():
                    return
            except ContainerGoneError:
                raise
            except DockerError as error:
                log.info("restarting container %s: %s", self.container_id[:12], error)
        self._engine.kill(self.container_id)
        self._host.backoff.run(lambda: self._engine.start(self.container_id))

    def _only_init_runs(self) -> bool:
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            if self._engine.count_processes(self.container_id) <= 1:
                return True
            time.sleep(0.02)  # killed, but not yet reaped
        return False

    def read(self, path: str) -> bytes:
        return self._file_job(file_scripts.READ, path)

    def write(self, path: str, data: bytes) -> None:
        self._file_job(file_scripts.WRITE, path, data)

    def delete(self, path: str) -> None:
        self._file_job(file_scripts.DELETE, path)

    def _file_job(self, script: str, path: str, stdin: bytes = b"") -> bytes:
        file_scripts.check_relative(path)
        argv = ["bash", "--norc", "--noprofile", "-c", script, "bash", self.workspace, path]
        result = self._run("exec " + shlex.join(argv), _FILE_S, _FILE_CAP_BYTES, stdin)
        if result.exit_code == 0 and not result.truncated:
            return result.output
        raise file_scripts.error(path, result)

    def snapshot(self) -> dict[str, bytes]:
        with self._lock:
            self._check_open()
            archive = self._engine.get_archive(self.container_id, self.workspace, _FILE_CAP_BYTES)
        return archives.plain_files(archive, strip=posixpath.basename(self.workspace))

    def put_files(self, folder: str, files: Mapping[str, bytes], *, mode: int = 0o644) -> None:
        """Write files below ``folder``, an absolute path that exists, as root."""
        with self._lock:
            self._check_open()
            self._engine.put_archive(self.container_id, folder, archives.pack(files, mode))

    def get_files(self, path: str, max_bytes: int = _FILE_CAP_BYTES) -> dict[str, bytes]:
        """Return every plain file at or below an absolute path, names relative to its parent.

        Raises FileNotFoundError, ArchiveTooLargeError above ``max_bytes``.
        """
        with self._lock:
            self._check_open()
            return archives.plain_files(
                self._engine.get_archive(self.container_id, path, max_bytes)
            )

    def kill_all(self) -> None:
        """Kill what runs; from another thread it ends a command in progress."""
        if not self._closed:
            self._kill_everything()

    def close(self) -> None:
        """Remove the container. Idempotent; a removal that fails is the host's to repeat."""
        if self._closed:
            return
        self._closed = True
        self._host.remove(self.container_id)
        self._drop_channel()

    def _check_open(self) -> None:
        if self._closed:
            raise ContainerGoneError("the sandbox is closed: expected=a sandbox that is open")


class _DiskGuard:
    """A watch on how much a running command writes; asked about twice a second."""

    def __init__(self, host: DockerHost, container_id: str, limit_bytes: int) -> None:
        self._host = host
        self._container_id = container_id
        self._limit_bytes = limit_bytes
        self.exceeded = False

    def has_room(self) -> bool:
        self._host.check_disk()
        added = self._host.engine.added_bytes(self._container_id)
        self.exceeded = added > self._limit_bytes
        return not self.exceeded


def _drain(stream: ExecStream, deadline: float) -> None:
    try:
        while (left := deadline - time.monotonic()) > 0 and stream.receive(left) != b"":
            pass
    finally:
        stream.close()
