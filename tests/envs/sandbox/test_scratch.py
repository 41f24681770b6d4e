"""Folders of sandboxes: gone with their owner, cleared away when the owner was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from envs.sandbox.scratch import Scratch, sweep

ROOT = Path(__file__).parents[3]
KILLED = """
import os, signal
from envs.sandbox.launch import SandboxSpec
from envs.sandbox.worker_sandbox import WorkerSandbox
box = WorkerSandbox(SandboxSpec("bubblewrap"))
box.write("a", b"1")
os.kill(os.getpid(), signal.SIGKILL)
"""


def groups(name: str) -> list[Path]:
    return [path for path in Path("/sys/fs/cgroup").glob(f"*/{name}") if path.is_dir()]


def run(script: str, root: Path) -> int:
    environment = {**os.environ, "TMPDIR": str(root)}
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, check=False
    ).returncode


def test_a_closed_sandbox_leaves_nothing(tmp_path: Path) -> None:
    script = KILLED.replace("os.kill(os.getpid(), signal.SIGKILL)", "box.close()")
    assert run(script.replace("bubblewrap", "process"), tmp_path) == 0
    assert os.listdir(tmp_path) == []


def test_what_a_killed_host_left_is_cleared_and_the_living_is_not(tmp_path: Path) -> None:
    assert run(KILLED, tmp_path) == -9
    (left,) = os.listdir(tmp_path)
    (tmp_path / "sandbox-other").mkdir()  # no lock: not one of ours
    living = Scratch(str(tmp_path))
    assert sweep(str(tmp_path)) == []  # too young: its owner may be about to lock it
    deadline = time.monotonic() + 10
    while (tmp_path / left).exists() and time.monotonic() < deadline:  # its processes may linger
        assert sweep(str(tmp_path), min_age_s=0) in ([left], [])
    assert sorted(os.listdir(tmp_path)) == sorted(["sandbox-other", living.name])
    assert groups(left) == []
    living.remove()
    living.remove()
    assert os.listdir(tmp_path) == ["sandbox-other"]
