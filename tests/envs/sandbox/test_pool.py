"""Warm workers: fresh work folders, replacement of the dead, and whose fault a death is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from envs.base import ExecResult
from envs.errors import InfrastructureError
from envs.sandbox.guest.protocol import Reply, Request
from envs.sandbox.jobs_client import case_job, exec_job, exec_result
from envs.sandbox.launch import SandboxSpec
from envs.sandbox.pool import SandboxPool
from envs.sandbox.scratch import sweep
from envs.sandbox.worker import Worker, WorkerDiedError

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module", params=["bubblewrap", "unshare", "process"])
def pool(request: pytest.FixtureRequest) -> Iterator[SandboxPool]:
    pool = SandboxPool(SandboxSpec(request.param), num_workers=2)
    yield pool
    pool.close()


def fresh(pool: SandboxPool, command: str, timeout_s: float = 20.0, **files: bytes) -> ExecResult:
    job = exec_job(
        ["bash", "-c", command],
        timeout_s=timeout_s,
        output_cap_bytes=1 << 16,
        files=files,
        fresh=True,
    )
    return exec_result(*pool.run(*job))


def test_each_job_has_a_fresh_work_folder(pool: SandboxPool) -> None:
    for _ in range(3):
        result = fresh(pool, "ls -A; echo mine > left; cat a", a=b"A\n")
        assert result.output == b"a\nA\n"


@pytest.mark.parametrize("kind", ["bubblewrap", "unshare"])
def test_nothing_passes_from_one_job_to_the_next(kind: str) -> None:
    pool = SandboxPool(SandboxSpec(kind), num_workers=1)
    plant = (
        "echo x > /tmp/plant; echo x > /dev/shm/plant; ipcmk -M 64 >&2;"
        " (setsid sleep 100 &) ; echo x > ../plant"
    )
    fresh(pool, plant)
    look = "ls /tmp /dev/shm ..; ipcs -m | grep -c 0x; ls -d /proc/[0-9]* | wc -l"
    lines = fresh(pool, look).output.decode().split()
    pool.close()
    assert "plant" not in lines
    segments, processes = lines[-2:]
    assert segments == "0"
    assert int(processes) <= 4


def test_jobs_run_side_by_side_on_as_many_workers(pool: SandboxPool) -> None:
    with ThreadPoolExecutor(6) as threads:
        results = list(threads.map(lambda i: fresh(pool, f"sleep 0.05; echo {i}"), range(12)))
    assert [int(result.output) for result in results] == list(range(12))
    assert pool.num_started <= 2


def test_a_killed_server_is_replaced_and_the_job_repeated(pool: SandboxPool) -> None:
    died = pool.num_died

    def kill_when_running() -> None:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            for pid in servers_below(os.getpid()):
                if napping_below(pid):
                    os.kill(pid, signal.SIGKILL)
                    return
            time.sleep(0.005)

    killer = threading.Thread(target=kill_when_running)
    killer.start()
    result = fresh(pool, "sleep 0.7251; echo done")
    killer.join()
    assert result.output == b"done\n"
    assert pool.num_died == died + 1


def children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(p) for task in tasks for p in (task / "children").read_text().split()]
    except OSError:
        return []


def below(pid: int) -> list[int]:
    found = children(pid)
    return found + [deeper for child in found for deeper in below(child)]


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def servers_below(pid: int) -> list[int]:
    """Processes of the server's program, innermost last."""
    return [p for p in below(pid) if b"guest.main" in cmdline(p) and b"python" in cmdline(p)[:200]]


def napping_below(pid: int) -> bool:
    return any(b"0.7251" in cmdline(p) for p in below(pid))


class DyingWorker(Worker):
    """Dies under every job, as a worker does whose machine kills its server."""

    def run(self, request: Request, body: bytes) -> Reply:
        self.close()
        raise WorkerDiedError("gone")


def test_two_deaths_in_a_row_are_infrastructure() -> None:
    pool = SandboxPool(SandboxSpec("process"), num_workers=1, start=DyingWorker)
    with pytest.raises(InfrastructureError, match="gone"):
        fresh(pool, "true")
    assert pool.num_died == 2
    pool.close()


def test_a_sandbox_that_cannot_start_is_infrastructure(tmp_path: Path) -> None:
    class Hopeless(Worker):
        def __init__(self, spec: SandboxSpec) -> None:
            raise InfrastructureError("no more processes")

    pool = SandboxPool(SandboxSpec("process"), num_workers=1, start=Hopeless)
    for _ in range(3):  # the slot is given back each time
        with pytest.raises(InfrastructureError, match="no more processes"):
            fresh(pool, "true")
    pool.close()


def test_a_closed_pool_says_so() -> None:
    pool = SandboxPool(SandboxSpec("process"), num_workers=1)
    pool.warm_up()
    pool.close()
    pool.close()
    with pytest.raises(InfrastructureError, match="closed"):
        fresh(pool, "true")


def test_a_worker_outlives_the_thread_that_started_it() -> None:
    pool = SandboxPool(SandboxSpec("bubblewrap"), num_workers=1)
    thread = threading.Thread(target=pool.warm_up)
    thread.start()
    thread.join()
    time.sleep(0.1)
    assert fresh(pool, "echo alive").output == b"alive\n"
    assert (pool.num_started, pool.num_died) == (1, 0)
    pool.close()


@pytest.mark.parametrize("kind", ["bubblewrap", "unshare", "process"])
def test_nothing_is_left_when_the_host_is_killed(kind: str, tmp_path: Path) -> None:
    script = f"""
        import sys
        from envs.sandbox.launch import SandboxSpec
        from envs.sandbox.worker_sandbox import WorkerSandbox
        box = WorkerSandbox(SandboxSpec({kind!r}))
        print("up", flush=True)
        box.exec(["sleep", "86398.5"], timeout_s=600)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as host:
        assert host.stdout is not None
        assert host.stdout.readline() == b"up\n"
        wait_for(lambda: any_with(b"86398.5"))
        host.kill()
    wait_for(lambda: not any_with(b"86398.5"))
    wait_for(lambda: bool(sweep(str(tmp_path), min_age_s=0)))


def any_with(word: bytes) -> bool:
    pids = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()]
    return any(word in cmdline(pid).split(b"\0") for pid in pids)


def wait_for(condition: object, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # pyright: ignore
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def test_the_cpu_budget_is_counted_from_outside(pool: SandboxPool) -> None:
    source = b"import signal\nsignal.setitimer(signal.ITIMER_PROF, 0)\ndef f():\n    while 1: 0\n"
    job = case_job(
        {"solution.py": source},
        ["from solution import f"],
        ["f()"],
        timeout_s=30,
        cpu_s=0.2,
        output_cap_bytes=1000,
    )
    started = time.monotonic()
    reply, _ = pool.run(*job)
    assert (reply.cpu_exceeded, reply.timed_out) == (True, False)
    assert time.monotonic() - started < 15


def test_sleeping_uses_no_cpu_but_ends_at_the_wall(pool: SandboxPool) -> None:
    source = b"import time\ndef f():\n    time.sleep(60)\n"
    job = case_job(
        {"solution.py": source},
        ["from solution import f"],
        ["f()"],
        timeout_s=0.4,
        cpu_s=0.2,
        output_cap_bytes=1000,
    )
    reply, _ = pool.run(*job)
    assert (reply.cpu_exceeded, reply.timed_out) == (False, True)
