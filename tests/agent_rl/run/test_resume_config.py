"""A checkpoint goes on only in the run that it is of: same seed, same tasks; the rest is told."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from loop_fakes import Notes, assembly, group

from agent_rl.config.reading import dump_config
from agent_rl.config.schema import (
    AlgorithmConfig,
    OptimConfig,
    RunConfig,
    TasksConfig,
    TrainConfig,
    TrainerConfig,
)
from agent_rl.errors import CheckpointError
from agent_rl.metrics.sink import MetricsSink
from agent_rl.run.resume import RECORD, changes_since
from agent_rl.run.training_run import _TrainingRun
from agent_rl.store.run_folder import RunFolder, read_metrics

METRICS = {"f_2": 0.0, "alarm_f2": 0.0, "replayed_fraction": 1.0, "time_step_s": 1.0}


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig(name="r", run_root=str(tmp_path), train=TrainConfig(steps=9, save_every=1))


@pytest.fixture
def folder(config: RunConfig) -> Iterator[RunFolder]:
    """A run that was stopped after step 2."""
    folder = RunFolder.create(config)
    run = _TrainingRun(config, folder, Notes(), assembly(config))
    with MetricsSink(folder.metrics_file, folder.tensorboard) as run.sink:
        for step in (1, 2):
            run.step_done(step, [group("g", (1.0, 0.0))], dict(METRICS))
    yield folder
    folder.close()


def resume(folder: RunFolder, config: RunConfig) -> list[str]:
    """As if ``config`` were in the folder by now; what is said."""
    folder.config_file.write_text(dump_config(config))
    folder.close()
    again, read = RunFolder.open(folder.path)
    notes = Notes()
    try:
        first = asyncio.run(_TrainingRun(read, again, notes, assembly(read)).restore())
    finally:
        again.close()
    assert first == 3
    return notes.texts


def test_the_run_itself_goes_on_without_a_word(folder: RunFolder, config: RunConfig) -> None:
    assert resume(folder, config) == ["resuming after step 2"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seed": 1}, "seed: got=1 expected=0"),
        ({"tasks": TasksConfig(seed=7)}, "tasks.seed: got=7 expected="),
        ({"tasks": TasksConfig(num_train=9)}, "tasks.num_train: got=9 expected="),
        ({"algorithm": AlgorithmConfig(groups_per_step=3)}, "algorithm.groups_per_step: got=3"),
    ],
)
def test_other_tasks_are_refused_before_anything_is_changed(
    folder: RunFolder, config: RunConfig, change: dict[str, object], told: str
) -> None:
    with pytest.raises(CheckpointError) as refused:
        resume(folder, replace(config, **change))  # type: ignore[arg-type]
    text = str(refused.value)
    assert told in text
    newest = folder.checkpoints / "step-00000002"
    command = shlex.split(text.partition("from its weights: ")[2])
    assert command == ["agent-rl", "train", "CONFIG", f"policy.path={newest}"]
    assert len(read_metrics(folder.metrics_file)) == 2
    assert resume(folder, config) == ["resuming after step 2"]  # put back


def test_what_else_changes_is_told(folder: RunFolder, config: RunConfig) -> None:
    changed = replace(config, optim=OptimConfig(lr=0.25))
    note, last = resume(folder, changed)
    assert note.startswith("not as step 2 was trained: optim.lr: got=0.25 expected=")
    assert last == "resuming after step 2"


def test_how_and_where_a_run_is_carried_out_may_change(
    folder: RunFolder, config: RunConfig, tmp_path: Path
) -> None:
    moved = replace(
        config,
        name="other",
        run_root=str(tmp_path / "elsewhere"),
        trainer=TrainerConfig(num_processes=2),
        train=replace(config.train, keep_last=5),
    )
    assert resume(folder, moved) == ["resuming after step 2"]


def test_a_checkpoint_of_before_is_taken_as_it_is(tmp_path: Path, config: RunConfig) -> None:
    """Without a record, and with keys that this version does not have."""
    assert changes_since(tmp_path, config) == []
    (tmp_path / RECORD).write_text('{"seed": 0, "gone": {"key": 1}, "optim": {"gone": 2}}')
    assert changes_since(tmp_path, config) == []
