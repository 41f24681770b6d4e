"""A run killed in the middle of a step continues as if nothing had happened."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import orjson
import pytest

from agent_rl.store.run_folder import read_metrics
from agent_rl.store.trajectories import read_trajectories

REPOSITORY = Path(__file__).parents[3]
AGENT_RL = [sys.executable, "-c", "from agent_rl.cli import main; main()"]
STEPS = 4
SMALL = [
    f"train.steps={STEPS}",
    "train.save_every=1",
    "algorithm.groups_per_step=6",
    "algorithm.group_size=4",
    "rollout.concurrency=24",
    "tasks.num_train=60",
    "tasks.num_heldout=8",
    "eval.num_tasks=8",
    "sandbox.num_workers=2",
]
TIMES = ("time_", "tokens_per_s", "routing_held_bytes")


def _train(root: Path, name: str, *arguments: str) -> subprocess.Popen[bytes]:
    config = str(REPOSITORY / "configs" / "repair_tiny.yaml")
    command = [*AGENT_RL, "train", config, *SMALL, f"run_root={root}", f"name={name}", *arguments]
    marked = {**os.environ, "AGENT_RL_TEST_RUN": f"{root}/{name}"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=marked)


def _finish(process: subprocess.Popen[bytes]) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output.decode()
    return output.decode()


def _numbers(root: Path, name: str) -> list[dict[str, float]]:
    rows = read_metrics(root / name / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in rows]


def _tasks(root: Path, name: str, step: int) -> list[str]:
    file = root / name / "trajectories" / f"step-{step:06d}.parquet"
    return [row["task_id"] for row in read_trajectories(file)]


def _wait_for_step(root: Path, name: str, step: int) -> None:
    deadline = time.monotonic() + 240
    while len(read_metrics(root / name / "metrics.jsonl")) < step:
        assert time.monotonic() < deadline, "the run does not get on"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    _finish(_train(root, "whole"))
    return root


@pytest.mark.slow
@pytest.mark.megatron
def test_a_run_leaves_everything_it_promises(uninterrupted: Path) -> None:
    folder = uninterrupted / "whole"
    summary = orjson.loads((folder / "summary.json").read_bytes())
    assert summary["completed"]
    assert summary["steps"] == STEPS
    assert summary["replayed_fraction"] == 1.0
    assert summary["num_heldout"] == 8
    assert (folder / "plots" / "run.png").stat().st_size > 10_000
    assert any((folder / "tensorboard").iterdir())
    trajectories = read_trajectories(folder / "trajectories" / "step-000001.parquet")
    assert len(trajectories) == 24
    for row in trajectories:
        tokens, rows = len(row["token_ids"]), row["routed_experts"]
        assert rows.shape == (tokens, 3, 4)
        assert sum(row["routed_present"]) == tokens - 1
        assert sum(turn["rows_requested"] for turn in row["turns"]) <= tokens - 1


@pytest.mark.slow
@pytest.mark.megatron
def test_kill_in_the_middle_of_a_step_then_resume(uninterrupted: Path) -> None:
    """Same tasks in the same order, and the same numbers to 1e-6."""
    process = _train(uninterrupted, "killed")
    _wait_for_step(uninterrupted, "killed", 2)
    time.sleep(0.4)  # somewhere inside step 3
    assert _marked_processes(f"{uninterrupted}/killed")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    _assert_all_gone(f"{uninterrupted}/killed")
    done = len(read_metrics(uninterrupted / "killed" / "metrics.jsonl"))
    assert 2 <= done < STEPS

    resume = [*AGENT_RL, "train", "--resume", str(uninterrupted / "killed")]
    output = _finish(subprocess.Popen(resume, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    assert "resuming after step" in output

    whole, killed = _numbers(uninterrupted, "whole"), _numbers(uninterrupted, "killed")
    assert [row["step"] for row in killed] == list(range(1, STEPS + 1))
    for expected, got in zip(whole, killed, strict=True):
        assert got == pytest.approx(expected, rel=1e-6, abs=1e-6)
    for step in range(1, STEPS + 1):
        assert _tasks(uninterrupted, "killed", step) == _tasks(uninterrupted, "whole", step)


@pytest.mark.slow
@pytest.mark.megatron
def test_ctrl_c_stops_cleanly_and_says_how_to_go_on(tmp_path: Path) -> None:
    process = _train(tmp_path, "stopped")
    _wait_for_step(tmp_path, "stopped", 1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output.decode()
    assert f"agent-rl train --resume {tmp_path}/stopped" in output.decode()
    assert "Traceback" not in output.decode()
    _assert_all_gone(f"{tmp_path}/stopped")
    saved = sorted(p.name for p in (tmp_path / "stopped" / "checkpoints").iterdir())
    assert saved
    assert all(name.startswith("step-") for name in saved)


@pytest.mark.slow
@pytest.mark.megatron
def test_rollouts_beside_updates_stop_and_go_on(uninterrupted: Path) -> None:
    """The first step after a start is on-policy, every other one is one update behind."""
    steps = 2 * STEPS  # room for the signal to come in time
    beside = ("train.overlap_rollout=true", "routing.max_staleness=1", f"train.steps={steps}")
    process = _train(uninterrupted, "beside", *beside)
    _wait_for_step(uninterrupted, "beside", 2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output.decode()
    _assert_all_gone(f"{uninterrupted}/beside")
    done = len(read_metrics(uninterrupted / "beside" / "metrics.jsonl"))
    assert 2 <= done < steps

    resume = [*AGENT_RL, "train", "--resume", str(uninterrupted / "beside")]
    _finish(subprocess.Popen(resume, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    numbers = _numbers(uninterrupted, "beside")
    assert [row["step"] for row in numbers] == list(range(1, steps + 1))
    whole = _numbers(uninterrupted, "whole")
    for key in ("reward_mean", "sampled_tokens", "kl_k3_rollout_old"):  # before the update
        assert numbers[0][key] == pytest.approx(whole[0][key], rel=1e-6, abs=1e-6)
    assert all(row["replayed_fraction"] == 1.0 for row in numbers)
    stale = [row["staleness_max"] for row in numbers]
    assert stale[:2] == [0.0, 1.0]
    assert stale.count(0.0) == 2  # step 1, and the first one after the resume
    for step in range(1, STEPS + 1):
        assert _tasks(uninterrupted, "beside", step) == _tasks(uninterrupted, "whole", step)


def _marked_processes(mark: str) -> list[str]:
    """Command lines of processes that inherited ``mark`` in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue  # gone meanwhile, or not ours
    return found


def _assert_all_gone(mark: str) -> None:
    deadline = time.monotonic() + 10
    while left := _marked_processes(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
