"""The cost of a sandbox, and a check that nothing of it outlives its killed controller.

Latencies are taken in turn, one of each kind after the other, so that load on the machine hits all
of them alike; only their ratio to a plain subprocess means anything. Then a controller process
plays short episodes and is killed by ``SIGKILL`` at random moments, again and again; after one more
clean start, what is left is counted on the machine itself.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from envs.sandbox.docker.docker_py import DockerPyEngine
from envs.sandbox.docker.docker_sandbox import DockerSandbox
from envs.sandbox.docker.host import DockerHost, HostLimits
from envs.sandbox.docker.options import DockerOptions
from envs.sandbox.docker.ownership import LABEL
from envs.sandbox.launch import SandboxSpec
from envs.sandbox.scratch import sweep
from envs.sandbox.worker_sandbox import WorkerSandbox

DEFAULT_IMAGE = "agent-rl/base:py"
_RUN_ID = "bench-sandbox"
_COMMAND = ("bash", "-c", "/bin/echo hi")
_LIMITS = HostLimits(disk_floor_bytes=1 << 30)
_OPTIONS = DockerOptions(memory_bytes=512 << 20, max_processes=128)
_MARK = "271828.5"  # seconds of a sleep that is easy to find among all processes


@dataclass(frozen=True)
class Latency:
    """Milliseconds."""

    median: float
    p90: float

    @classmethod
    def of(cls, seconds: list[float]) -> Latency:
        ordered = sorted(1000 * value for value in seconds)
        return cls(statistics.median(ordered), ordered[int(0.9 * (len(ordered) - 1))])


@dataclass(frozen=True)
class Leftovers:
    """Things on a machine that this benchmark could have made."""

    containers: int
    processes: int
    mounts: int
    volumes: int
    folders: int

    def minus(self, other: Leftovers) -> Leftovers:
        before = asdict(other)
        return Leftovers(**{name: value - before[name] for name, value in asdict(self).items()})


@dataclass(frozen=True)
class SandboxReport:
    """``exec_ratios`` are medians over the plain subprocess' median."""

    exec_ms: dict[str, Latency]
    exec_ratios: dict[str, float]
    lifecycle_ms: dict[str, Latency]
    num_episodes: int = 0
    num_kills: int = 0
    left_behind: Leftovers | None = None
    load_average: tuple[float, float, float] = field(default_factory=os.getloadavg)


def main(
    json_path: Path | None = None,
    *,
    image: str = DEFAULT_IMAGE,
    docker_url: str | None = None,
    repeats: int = 60,
    episodes: int = 200,
) -> SandboxReport:
    """Measure, print and optionally write the report; raises SystemExit when anything is left.

    Needs a container engine (``DOCKER_HOST`` or ``docker_url``) that has ``image``.
    """
    engine = DockerPyEngine(docker_url)
    host = DockerHost(engine, _RUN_ID, _LIMITS)
    host.clean_up()
    with tempfile.TemporaryDirectory(prefix="agent-rl-bench-") as scratch:
        before = count_leftovers(engine, Path(scratch), set())
        exec_ms = measure_exec(host, image, repeats)
        lifecycle_ms = measure_lifecycle(host, image, max(5, repeats // 6))
        kills = Kills()
        if episodes:
            kills = play_and_kill(image, docker_url, episodes, Path(scratch))
        # The next start: what every run does first.
        host.clean_up()
        sweep(scratch, min_age_s=0.0)
        left = count_leftovers(engine, Path(scratch), kills.sandboxes).minus(before)
    plain = exec_ms["plain subprocess"].median
    ratios = {name: latency.median / plain for name, latency in exec_ms.items()}
    report = SandboxReport(exec_ms, ratios, lifecycle_ms, episodes, kills.number, left)
    host.close()
    print(render(report))
    if json_path is not None:
        json_path.write_text(json.dumps(asdict(report), indent=1))
    if any(asdict(left).values()):
        raise SystemExit(f"the sandboxes left something behind: {left}")
    return report


def measure_exec(host: DockerHost, image: str, repeats: int) -> dict[str, Latency]:
    """One command by every road, in turn."""
    docker_box = DockerSandbox.start(host, image, _OPTIONS)
    worker = WorkerSandbox(SandboxSpec("bubblewrap"))
    roads: Mapping[str, Callable[[], object]] = {
        "plain subprocess": lambda: subprocess.run(_COMMAND, capture_output=True, check=True),
        "docker, persistent shell": lambda: docker_box.exec(_COMMAND, timeout_s=60),
        "docker, shell with state": lambda: docker_box.run_shell("/bin/echo hi", timeout_s=60),
        "docker, exec of the engine": lambda: docker_box.exec_trusted(_COMMAND, timeout_s=60),
        "bubblewrap": lambda: worker.exec(_COMMAND, timeout_s=60),
    }
    try:
        return _in_turn(roads, repeats)
    finally:
        worker.close()
        docker_box.close()


def measure_lifecycle(host: DockerHost, image: str, repeats: int) -> dict[str, Latency]:
    """Starting a sandbox up to its first possible command, and taking it down."""
    times: dict[str, list[float]] = {}
    starts: Mapping[str, Callable[[], DockerSandbox | WorkerSandbox]] = {
        "docker": lambda: DockerSandbox.start(host, image, _OPTIONS),
        "bubblewrap": lambda: WorkerSandbox(SandboxSpec("bubblewrap")),
    }
    for _ in range(repeats):
        for name, start in starts.items():
            began = time.perf_counter()
            box = start()
            started = time.perf_counter()
            box.close()
            times.setdefault(f"{name} start", []).append(started - began)
            times.setdefault(f"{name} teardown", []).append(time.perf_counter() - started)
    return {name: Latency.of(values) for name, values in times.items()}


def _in_turn(roads: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, Latency]:
    times: dict[str, list[float]] = {name: [] for name in roads}
    for _ in range(repeats):
        for name, road in roads.items():
            began = time.perf_counter()
            road()
            times[name].append(time.perf_counter() - began)
    return {name: Latency.of(values) for name, values in times.items()}


@dataclass
class Kills:
    """The number of controllers killed, and the bubblewrap sandboxes they had just then."""

    number: int = 0
    sandboxes: set[str] = field(default_factory=set[str])


def play_and_kill(
    image: str, docker_url: str | None, episodes: int, scratch: Path, seed: int = 0
) -> Kills:
    """Have controllers play ``episodes`` episodes, killing them at random.

    A killed episode counts as played: it is the one that could leave something.
    """
    rng = random.Random(seed)
    kills, played = Kills(), 0
    argv = [sys.executable, "-m", "agent_rl.bench.sandbox", image, docker_url or ""]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    while played < episodes:
        with subprocess.Popen(argv, stdout=subprocess.PIPE, env=environment) as controller:
            assert controller.stdout is not None
            for _ in range(rng.randrange(1, 9)):
                if not controller.stdout.readline():
                    raise SystemExit(f"the controller ended by itself: {controller.wait()}")
                played += 1
            time.sleep(rng.uniform(0.0, 1.2))  # somewhere in starting, working or taking down
            controller.send_signal(signal.SIGKILL)
        kills.number += 1
        kills.sandboxes |= {folder.name for folder in scratch.iterdir()}
    return kills


def control(image: str, docker_url: str | None) -> None:
    """Play episodes for ever, one line per episode begun: the process that gets killed."""
    host = DockerHost(DockerPyEngine(docker_url), _RUN_ID, _LIMITS)
    host.clean_up()
    while True:
        print("episode", flush=True)
        boxes = (
            DockerSandbox.start(host, image, _OPTIONS),
            WorkerSandbox(SandboxSpec("bubblewrap")),
        )
        for box in boxes:
            box.write("work.txt", b"x" * 10_000)
            box.exec(["bash", "-c", f"setsid sleep {_MARK} & cat work.txt"], timeout_s=60)
            box.exec(["bash", "-c", f"setsid sleep {_MARK} & sleep {_MARK}"], timeout_s=0.2)
            box.close()


def count_leftovers(engine: DockerPyEngine, scratch: Path, sandboxes: set[str]) -> Leftovers:
    """Counted on the machine, not asked of the code that should have cleaned up.

    ``sandboxes`` are names of bubblewrap sandboxes whose control groups would be left.
    """
    data_root = engine.info().data_root
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    groups = Path("/sys/fs/cgroup")
    parents = (groups, groups / "memory", groups / "pids")
    left_groups = [p / name for p in parents for name in sandboxes if (p / name).exists()]
    return Leftovers(
        containers=len(engine.list_containers(LABEL)),
        processes=sum(_MARK in command for command in _command_lines()),
        mounts=sum(data_root in mount or str(scratch) in mount for mount in mounts),
        volumes=engine.count_volumes(),
        folders=len(list(scratch.iterdir())) + len(left_groups),
    )


def _command_lines() -> list[str]:
    found: list[str] = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(entry.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def render(report: SandboxReport) -> str:
    """The report as a plain table."""
    lines = [f"{'one command':30} {'median ms':>10} {'p90 ms':>10} {'x plain':>8}"]
    for name, latency in report.exec_ms.items():
        ratio = report.exec_ratios[name]
        lines.append(f"{name:30} {latency.median:10.1f} {latency.p90:10.1f} {ratio:8.1f}")
    lines += ["", f"{'life of a sandbox':30} {'median ms':>10} {'p90 ms':>10}"]
    for name, latency in report.lifecycle_ms.items():
        lines.append(f"{name:30} {latency.median:10.1f} {latency.p90:10.1f}")
    lines += [
        "",
        f"{report.num_episodes} episodes, {report.num_kills} controllers killed by SIGKILL",
    ]
    lines.append(f"left behind: {report.left_behind}")
    return "\n".join(lines)


if __name__ == "__main__":
    control(sys.argv[1], sys.argv[2] or None)
