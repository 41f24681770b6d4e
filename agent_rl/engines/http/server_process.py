"""Launching a server, watching it, starting it again with back-off, and stopping it by its id."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from agent_rl.errors import EngineSetupError, EngineUnavailableError
from agent_rl.run.process_guard import ProcessGuard

_GRACE_S = 10.0  # for a server to end by itself
_REPOSITORY = Path(__file__).resolve().parents[3]
_LOG_TAIL_BYTES = 4096


def engines_dir() -> Path:
    """Return the folder of engine environments: ``$AGENT_RL_ENGINES_DIR``, else ``.venvs`` here."""
    return Path(os.environ.get("AGENT_RL_ENGINES_DIR") or _REPOSITORY / ".venvs")


def engine_python(engine: str) -> Path:
    """Return the interpreter of an engine's environment.

    Raises:
        EngineSetupError: it has not been built.
    """
    python = engines_dir() / engine / "bin" / "python"
    if not python.is_file():
        raise EngineSetupError(
            [
                f"the {engine} environment is absent: got no {python}; build it with "
                f"scripts/engines/install.sh {engine}, or set AGENT_RL_ENGINES_DIR"
            ]
        )
    return python


@dataclass(frozen=True)
class ServerSpec:
    """A server to run. ``environment`` is added to ours."""

    name: str
    command: tuple[str, ...]
    url: str
    health_path: str
    log_file: Path
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    niceness: int = 0
    start_timeout_s: float = 600.0


@dataclass(frozen=True)
class RestartPolicy:
    """Back-off of restarts: ``first_s`` doubled up to ``most_s``; ``max_restarts`` in a row."""

    first_s: float = 1.0
    most_s: float = 60.0
    max_restarts: int = 5
    healthy_after_s: float = 300.0  # a server that lived this long starts counting from zero


class ServerProcess:
    """One run of a server, in a process group of its own that ends with this process."""

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        self._guard: ProcessGuard | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.started_at = 0.0

    @property
    def group(self) -> int | None:
        """Id of the process group that the server and its guard are in."""
        return None if self._guard is None else self._guard.group

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def cpu_s(self) -> float:
        """Return the CPU seconds that living processes of the server's group used. Linux only."""
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                fields = stat.read_text().rsplit(")", 1)[1].split()
                if int(fields[2]) == self.group:
                    ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def start(self) -> None:
        """Launch; returns at once. Output goes to the end of the log file."""
        spec = self.spec
        spec.log_file.parent.mkdir(parents=True, exist_ok=True)
        nice = ("nice", "-n", str(spec.niceness)) if spec.niceness else ()
        self._guard = ProcessGuard(_GRACE_S)
        with spec.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [*nice, *spec.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **spec.environment},
                process_group=self._guard.group,
            )
        self.started_at = time.monotonic()

    async def wait_healthy(self) -> None:
        """Wait until the health path answers.

        Raises:
            EngineUnavailableError: the process ended, or was not healthy in time; with the end
                of its log.
        """
        spec = self.spec
        deadline = time.monotonic() + spec.start_timeout_s
        async with httpx.AsyncClient(base_url=spec.url, trust_env=False, timeout=30.0) as client:
            while time.monotonic() < deadline:
                if not self.is_alive:
                    raise EngineUnavailableError(
                        f"{spec.name} ended while starting; the end of {spec.log_file}:\n"
                        f"{self.log_tail()}"
                    )
                with suppress(httpx.TransportError):
                    if (await client.get(spec.health_path)).status_code == 200:
                        return
                await asyncio.sleep(0.25)
        raise EngineUnavailableError(
            f"{spec.name} was not healthy after {spec.start_timeout_s:.0f} s; the end of "
            f"{spec.log_file}:\n{self.log_tail()}"
        )

    async def stop(self, grace_s: float = _GRACE_S) -> None:
        """End the server by SIGTERM, and what is left of its group by SIGKILL after ``grace_s``.

        Idempotent.
        """
        process, guard = self._process, self._guard
        if process is None or guard is None:
            return
        if process.poll() is None:
            os.killpg(guard.group, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        guard.kill()
        process.wait()

    def log_tail(self) -> str:
        """Return the last 4 KiB of the log."""
        if not self.spec.log_file.is_file():
            return ""
        with self.spec.log_file.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - _LOG_TAIL_BYTES))
            return log.read().decode(errors="replace")


class Supervisor:
    """Keeps a server running: when it ends by itself, starts it again with back-off.

    Args:
        spec: the server.
        policy: restarts.
        on_restart: awaited when a restarted server is healthy again, before anybody is told;
            this is where weights are restored.
    """

    def __init__(
        self,
        spec: ServerSpec,
        policy: RestartPolicy | None = None,
        on_restart: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.process = ServerProcess(spec)
        self.policy = policy or RestartPolicy()
        self.on_restart = on_restart
        self.num_restarts = 0
        self.gave_up = ""
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Launch, wait until healthy, then watch in the background."""
        self.process.start()
        try:
            await self.process.wait_healthy()
        except BaseException:
            await self.process.stop()
            raise
        self._watch = asyncio.get_running_loop().create_task(self._keep_running())

    async def stop(self) -> None:
        """Stop watching, then the server. Idempotent."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})
            self._watch = None
        await self.process.stop()

    async def _keep_running(self) -> None:
        in_a_row = 0
        while True:
            while self.process.is_alive:
                await asyncio.sleep(0.2)
            await self.process.stop()  # what it started must not keep its port or its memory
            if time.monotonic() - self.process.started_at > self.policy.healthy_after_s:
                in_a_row = 0
            if in_a_row >= self.policy.max_restarts:
                self.gave_up = f"ended {in_a_row + 1} times in a row"
                return
            await asyncio.sleep(min(self.policy.most_s, self.policy.first_s * 2**in_a_row))
            in_a_row += 1
            self.num_restarts += 1
            self.process.start()
            try:
                await self.process.wait_healthy()
                if self.on_restart is not None:
                    await self.on_restart()
            except EngineUnavailableError:
                continue  # counted; the next round starts it again
