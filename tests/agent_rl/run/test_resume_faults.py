"""What a resumed run does about checkpoints that only look complete."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from loop_fakes import FakeTrainer, Notes, assembly, group

from agent_rl.config.schema import RunConfig, TrainConfig
from agent_rl.errors import CheckpointError, EngineError, TrainerError
from agent_rl.metrics.summary import Evaluation
from agent_rl.run import training_run
from agent_rl.run.parts import Assembly
from agent_rl.run.training_run import _TrainingRun
from agent_rl.store.run_folder import RunFolder, read_metrics, write_aside
from agent_rl.trainer.checkpoint import MANIFEST, CheckpointStore
from agent_rl.types import Group, TrainSample
from envs.base import Task


@pytest.fixture
def run_folder(tmp_path: Path):
    """A run of ten steps with the checkpoints of steps 9 and 10, closed again."""
    config = RunConfig(name="r", run_root=str(tmp_path), train=TrainConfig(steps=20))
    folder = RunFolder.create(config)
    rows = [orjson.dumps({"step": n, "time_step_s": 1.0}) + b"\n" for n in range(1, 11)]
    write_aside(folder.metrics_file, b"".join(rows))
    for step in (9, 10):
        write_aside(folder.trajectories_file(step), b"x")
        trainer = FakeTrainer(weight_version=step)
        CheckpointStore(folder.checkpoints).save(step, trainer.save)
    yield folder
    folder.close()


def restore(folder: RunFolder) -> tuple[int, list[str], Assembly]:
    config = RunConfig(name="r", run_root=str(folder.path.parent), train=TrainConfig(steps=20))
    parts, notes = assembly(config), Notes()
    first = asyncio.run(_TrainingRun(config, folder, notes, parts).restore())
    return first, notes.texts, parts


def test_an_intact_run_continues_after_the_step_that_is_larger_as_a_number(run_folder) -> None:
    first, notes, parts = restore(run_folder)
    assert (first, notes) == (11, ["resuming after step 10"])
    assert parts.loop.trainer.weight_version == parts.loop.engine.weight_version == 10
    assert len(read_metrics(run_folder.metrics_file)) == 10


@pytest.mark.parametrize("fault", ["short", "changed", "absent", "no manifest", "torn manifest"])
def test_a_damaged_newest_checkpoint_is_named_and_its_steps_are_done_again(
    run_folder, fault: str
) -> None:
    newest = run_folder.checkpoints / "step-00000010"
    weights, manifest = newest / "weights", newest / MANIFEST
    if fault == "short":
        os.truncate(weights, weights.stat().st_size - 1)
    elif fault == "changed":
        weights.write_text("99")
    elif fault == "absent":
        weights.unlink()
    elif fault == "no manifest":
        manifest.unlink()
    else:
        os.truncate(manifest, manifest.stat().st_size // 2)
    first, notes, parts = restore(run_folder)
    assert first == 10
    assert notes[0].startswith("checkpoint step-00000010 not used: ")
    assert ("weights" if fault in ("short", "changed", "absent") else MANIFEST) in notes[0]
    assert notes[1:] == ["resuming after step 9"]
    assert parts.loop.trainer.weight_version == parts.loop.engine.weight_version == 9
    assert [row["step"] for row in read_metrics(run_folder.metrics_file)] == list(range(1, 10))
    left = sorted(file.name for file in (run_folder.path / "trajectories").iterdir())
    assert left == ["step-000009.parquet"]


def test_with_no_checkpoint_to_trust_nothing_is_restarted_or_deleted(run_folder) -> None:
    for step in (9, 10):
        (run_folder.checkpoints / f"step-{step:08d}" / "weights").unlink()
    with pytest.raises(CheckpointError, match=r"step-00000010: .*step-00000009: .*start over"):
        restore(run_folder)
    assert len(read_metrics(run_folder.metrics_file)) == 10
    assert len(list((run_folder.path / "trajectories").iterdir())) == 2


def test_a_checkpoint_folder_that_went_missing_is_not_looked_for(run_folder) -> None:
    """There is no tracker file that could name it: what is there and verifies is what counts."""
    newest = run_folder.checkpoints / "step-00000010"
    newest.rename(run_folder.checkpoints / ".partial-00000010-1")
    first, notes, _ = restore(run_folder)
    assert (first, notes) == (10, ["resuming after step 9"])


def test_a_damaged_checkpoint_does_not_push_a_good_one_out(run_folder) -> None:
    """After going back to step 9 the next save keeps two that can be used, not one."""
    (run_folder.checkpoints / "step-00000010" / "weights").unlink()
    store = CheckpointStore(run_folder.checkpoints, keep_last=2)
    store.save(11, FakeTrainer(weight_version=11).save)
    assert store.steps() == [9, 11]
    found = store.latest()
    assert found is not None
    assert (found.step, found.skipped) == (11, ())


class Breaks:
    """A collector whose rollout fails in one step, and evaluations that cost nothing."""

    def __init__(self, rollout_at: int = 0, error: Exception | None = None):
        self.rollout_at = rollout_at
        self.error = error or EngineError("the engine is gone")

    async def collect(self, tasks: Sequence[Task], step: int, first_group: int = 0) -> list[Group]:
        if step == self.rollout_at:
            raise self.error
        return [group(f"step{step}", (1.0, 0.0))]

    async def evaluate(self, name: str) -> Evaluation:
        return Evaluation(0.5, 2, 0, {}, 1.0)


class Torn(FakeTrainer):
    """A trainer whose third step fails between two of its optimizer steps."""

    torn = False

    def step(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        self.torn = self.weight_version == 2
        if self.torn:
            raise TrainerError("no finite gradient")
        return super().step(samples)

    def save(self, folder: Path) -> None:
        if self.torn:
            raise TrainerError("a step failed while the weights moved")
        super().save(folder)


def run_until_it_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: Breaks, trainer: FakeTrainer
) -> tuple[RunFolder, list[str]]:
    train = TrainConfig(steps=6, save_every=10, mismatch_every=0)
    config = RunConfig(name="r", run_root=str(tmp_path), train=train)
    parts = assembly(config)
    parts = replace(parts, loop=replace(parts.loop, collect=breaks.collect, trainer=trainer))
    monkeypatch.setattr(training_run, "assemble", lambda config, on_rollout: parts)
    monkeypatch.setattr(training_run._TrainingRun, "evaluation", breaks.evaluate)
    folder, notes = RunFolder.create(config), Notes()
    with pytest.raises(type(breaks.error)):
        asyncio.run(training_run.run_training(config, folder, notes))
    return folder, notes.texts


@pytest.mark.parametrize("error", [EngineError("gone"), OSError(28, "full"), ValueError("a bug")])
def test_a_failure_in_step_four_loses_none_of_the_three_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    breaks = Breaks(rollout_at=4, error=error)
    folder, _ = run_until_it_breaks(tmp_path, monkeypatch, breaks, FakeTrainer())
    with closing(folder):
        assert CheckpointStore(folder.checkpoints).steps() == [3]


def test_a_trainer_whose_weights_lie_between_two_versions_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks = Breaks(error=TrainerError("no finite gradient"))
    folder, notes = run_until_it_breaks(tmp_path, monkeypatch, breaks, Torn())
    with closing(folder):
        assert CheckpointStore(folder.checkpoints).steps() == []
    assert any("step 2 could not be saved: a step failed while" in text for text in notes)
