"""A trainer's checkpoints under a kill, a full disk and truncated files, at many points."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fixture_types import MakePolicy, MakeSamples, MakeTrainer

from agent_rl.trainer.checkpoint import MANIFEST, CheckpointStore

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

WRITER = Path(__file__).with_name("checkpoint_writer.py")
DEADLINE_S = 120


def start(policy: Path, root: Path, *limits: int) -> subprocess.Popen[str]:
    arguments = [",".join(map(str, limits))] if limits else []
    return subprocess.Popen(
        [sys.executable, str(WRITER), str(policy), str(root), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def small(make_policy: MakePolicy) -> Path:
    return make_policy(num_hidden_layers=2, num_experts=8)


def test_a_kill_in_the_middle_of_saving_leaves_a_checkpoint_to_resume_from(
    small: Path, tmp_path: Path, make_trainer: MakeTrainer
) -> None:
    with start(small, tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "saved 1\n"
        time.sleep(random.Random().uniform(0.2, 0.5))  # anywhere: nearly all of it is saving
        process.send_signal(signal.SIGKILL)
    found = CheckpointStore(tmp_path).latest()
    assert found is not None
    assert found.step >= 2
    assert found.skipped == ()
    trainer = make_trainer(small)
    trainer.load(found.folder)
    assert trainer.weight_version == 1


def test_a_disk_that_is_full_in_any_file_is_an_error_and_leaves_the_last_one(
    small: Path, tmp_path: Path, make_trainer: MakeTrainer, make_samples: MakeSamples
) -> None:
    """Room for all but the last byte of each of the checkpoint's files in turn, then for all."""
    trainer = make_trainer(small)
    trainer.step(make_samples([12], folder=small))
    folder = CheckpointStore(tmp_path / "sizes").save(1, trainer.save)
    sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
    limits = sorted(size - 1 for size in sizes)
    with start(small, tmp_path / "full", *limits, max(sizes) * 2) as process:
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    lines = out.splitlines()[1:]
    assert len(lines) == len(limits) + 1
    for limit, line in zip(limits, lines[:-1], strict=True):
        assert line.startswith(f"{limit}: no space for the checkpoint of step 2"), line
    assert lines[-1].endswith("saved")
    left = sorted(folder.name for folder in (tmp_path / "full").iterdir())
    assert left == ["step-00000001", "step-00000002"]


def test_every_file_short_by_one_byte_or_absent_is_noticed(
    small: Path, tmp_path: Path, make_trainer: MakeTrainer
) -> None:
    store, trainer = CheckpointStore(tmp_path, keep_last=2), make_trainer(small)
    store.save(1, trainer.save)
    newest = store.save(2, trainer.save)
    files = [file for file in newest.rglob("*") if file.is_file()]
    names = {file.relative_to(newest).as_posix() for file in files}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "trainer/optimizer-00000.safetensors",
        "trainer/position.json",
        "trainer/rng-00000.safetensors",
        MANIFEST,
    }
    for file in files:
        whole = file.read_bytes()
        for left in (whole[:-1], b""):
            file.write_bytes(left)
            found = store.latest()
            assert found is not None
            assert (found.step, len(found.skipped)) == (1, 1), file
            assert file.name in found.skipped[0].reason
        file.unlink()
        found = store.latest()
        assert found is not None
        assert found.step == 1
        file.write_bytes(whole)
    found = store.latest()
    assert found is not None
    assert found.step == 2
