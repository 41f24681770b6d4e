"""A checkpoint goes on only in the run that it is of: same seed, same tasks; the rest is told."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterator
from contextlib import closing
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
from agent_rl.run.parts import Assembly
from agent_rl.run.resume import RECORD, changes_since
from agent_rl.run.training_run import _TrainingRun
from agent_rl.store.run_folder import RunFolder, read_metrics
from agent_rl.tasks.curriculum import Curriculum
from agent_rl.tasks.digest import tasks_digest
from envs.base import Task

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


TASK = Task("a", "issue", {"a.py": b"x = 1"}, "a.py", (), {"t.py": b"assert x"}, {}, b"")


def with_tasks(config: RunConfig, *tasks: Task) -> Assembly:
    parts = assembly(config)
    return replace(parts, loop=replace(parts.loop, curriculum=Curriculum(tasks, 1, seed=0)))


@pytest.mark.parametrize(
    "now",
    [
        (TASK,),
        (replace(TASK, task_id="b"), TASK),
        (TASK, replace(TASK, task_id="b", hidden_files={"t.py": b"assert True"})),
        (TASK, replace(TASK, task_id="b", issue="another issue")),
    ],
    ids=["one is gone", "another order", "other tests under the same name", "another issue"],
)
def test_tasks_that_changed_under_the_same_configuration_are_refused(
    tmp_path: Path, config: RunConfig, now: tuple[Task, ...]
) -> None:
    before = (TASK, replace(TASK, task_id="b"))
    folder, notes = RunFolder.create(config), Notes()
    with closing(folder):
        run = _TrainingRun(config, folder, notes, with_tasks(config, *before))
        with MetricsSink(folder.metrics_file, folder.tensorboard) as run.sink:
            run.step_done(1, [group("g", (1.0, 0.0))], dict(METRICS))
        asyncio.run(_TrainingRun(config, folder, notes, with_tasks(config, *before)).restore())
        changed = _TrainingRun(config, folder, notes, with_tasks(config, *now))
        with pytest.raises(CheckpointError, match=rf"got={len(now)} tasks .*expected=2 with"):
            asyncio.run(changed.restore())
        assert asyncio.run(changed.restore(other_tasks=True)) == 2
    assert "going on with other tasks, as asked" in notes.texts[-2]


def test_a_digest_of_tasks_tells_fields_apart_and_is_the_same_in_every_process() -> None:
    assert tasks_digest([TASK]) == "0d204deee2119553"
    others = [
        replace(TASK, task_id="aissue", issue=""),
        replace(TASK, files={"a.py": b"x = 1", "b.py": b""}),
        replace(TASK, metadata={"family": "step"}),
    ]
    assert len({tasks_digest([task]) for task in [TASK, *others]}) == 4


def test_more_steps_are_told_only_where_they_change_the_rate(
    folder: RunFolder, config: RunConfig
) -> None:
    longer = replace(config, train=replace(config.train, steps=20))
    assert resume(folder, longer) == ["resuming after step 2"]
    decaying = replace(longer, optim=OptimConfig(decay="linear"))
    notes = resume(folder, decaying)
    assert any("train.steps: got=20 expected=9 (the learning rate" in note for note in notes)
