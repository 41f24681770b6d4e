"""``agent-rl train`` over two ranks: a rank or the driver is killed, and the run continues."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rank_cases import assert_gone

from agent_rl.config.reading import load_resolved
from agent_rl.store.run_folder import read_metrics
from agent_rl.trainer.checkpoint import CheckpointStore

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

CONFIG = Path(__file__).parents[4] / "configs" / "repair_tiny.yaml"
SMALL = (
    "algorithm.groups_per_step=4",
    "algorithm.num_mini_steps=2",
    "train.steps=3",
    "train.save_every=1",
    "train.mismatch_every=0",
    "eval.num_tasks=2",
    "trainer.num_processes=2",
    "trainer.launcher=local",
)
DEADLINE_S = 240


def agent_rl(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", "from agent_rl.cli import main; main()", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def worker_pids(driver: int) -> list[int]:
    """The driver's ranks, in the order of their ranks."""
    found: dict[int, int] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if (
                parent != driver
                or b"trainer.workers.worker" not in (process / "cmdline").read_bytes()
            ):
                continue
            (rank,) = (
                v for v in (process / "environ").read_bytes().split(b"\0") if v.startswith(b"RANK=")
            )
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended meanwhile
        found[int(rank.removeprefix(b"RANK="))] = int(process.name)
    return [found[rank] for rank in sorted(found)]


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def resume(run: Path, *layout: str) -> str:
    """Finish the run; what it said."""
    resumed = agent_rl("train", "--resume", str(run), *layout)
    try:
        output, _ = resumed.communicate(timeout=DEADLINE_S)
    finally:
        resumed.kill()
        resumed.wait()
    assert resumed.returncode == 0, output
    return output


def test_a_run_whose_rank_is_killed_says_so_and_resumes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    metrics = run / "metrics.jsonl"
    train = agent_rl("train", str(CONFIG), f"run_root={tmp_path}", "name=run", *SMALL)
    try:
        wait_for((run / "checkpoints" / "step-00000001").exists, train)
        pids = worker_pids(train.pid)
        assert len(pids) == 2
        os.kill(pids[1], signal.SIGSTOP)  # the next step begins and cannot end
        time.sleep(3.0)
        os.kill(pids[1], signal.SIGKILL)
        output, _ = train.communicate(timeout=DEADLINE_S)
    finally:
        train.kill()
        train.wait()
    assert train.returncode not in (0, -signal.SIGKILL)
    said = " ".join(output.split())
    assert "trainer rank 1 is gone during step" in said
    assert "was ended by SIGKILL" in said
    assert "--resume" in said
    assert_gone(pids)

    output = resume(run)
    assert "resuming after step" in output
    assert [row["step"] for row in read_metrics(metrics)] == [1, 2, 3]
    assert all(row["transfer_bytes"] > 0 for row in read_metrics(metrics) if "loss" in row)


OF_THE_PROCESSES = ("time_", "tokens_per_s", "transfer_bytes", "routing_held_bytes")


def test_a_run_whose_driver_is_killed_resumes_with_another_number_of_ranks(tmp_path: Path) -> None:
    """The step that was done and not saved is done again, with the same numbers."""
    run = tmp_path / "run"
    metrics = run / "metrics.jsonl"
    settings = (*SMALL, "train.steps=4", "train.save_every=2", "algorithm.groups_per_step=2")
    memory = set(os.listdir("/dev/shm"))
    train = agent_rl("train", str(CONFIG), f"run_root={tmp_path}", "name=run", *settings)
    try:
        wait_for(lambda: len(read_metrics(metrics)) == 3, train)
        pids = worker_pids(train.pid)
        assert len(pids) == 2
    finally:
        train.kill()
        train.communicate()
    assert_gone(pids)
    assert set(os.listdir("/dev/shm")) <= memory
    killed = {row["step"]: row for row in read_metrics(metrics)}
    saved = CheckpointStore(run / "checkpoints").latest()
    assert saved is not None

    layout = ("trainer.num_processes=1", "trainer.launcher=inline")
    output = resume(run, *layout)
    assert f"resuming after step {saved.step}" in output
    assert load_resolved(run / "config.yaml").trainer.num_processes == 1
    again = {row["step"]: row for row in read_metrics(metrics)}
    assert list(again) == [1, 2, 3, 4]
    for step, row in killed.items():
        expected = {k: v for k, v in row.items() if not k.startswith(OF_THE_PROCESSES)}
        got = {k: v for k, v in again[step].items() if k in expected}
        assert got == pytest.approx(expected, rel=1e-4, abs=1e-6), step
