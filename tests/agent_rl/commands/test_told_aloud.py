"""What a run tells the person who started it: an alarm at its step, advice before the first one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from loop_fakes import Notes, assembly, group

from agent_rl.config.schema import (
    AlgorithmConfig,
    PolicyConfig,
    RoutingConfig,
    RunConfig,
    TasksConfig,
    TrainConfig,
)
from agent_rl.errors import AgentRLError
from agent_rl.metrics.sink import MetricsSink
from agent_rl.run.training_run import _TrainingRun, run_training
from agent_rl.store.run_folder import RunFolder, read_metrics


@pytest.mark.parametrize("stops", [False, True])
def test_an_alarm_is_shown_written_and_ends_a_run_that_asked_for_it(
    tmp_path: Path, stops: bool
) -> None:
    train = TrainConfig(steps=9, stop_on_alarm=stops)
    config = RunConfig(name="r", run_root=str(tmp_path), train=train)
    folder, notes = RunFolder.create(config), Notes()
    run = _TrainingRun(config, folder, notes, assembly(config))
    ended: list[bool] = []
    with MetricsSink(folder.metrics_file, folder.tensorboard) as run.sink:
        for step, (f2, level) in enumerate(((0.01, 0.0), (0.06, 1.0), (0.2, 2.0)), start=1):
            metrics = {"f_2": f2, "alarm_f2": level, "replayed_fraction": 0.0, "time_step_s": 1.0}
            ended.append(run.step_done(step, [group("g", (1.0, 0.0))], metrics))
    folder.close()
    assert [text.split(":")[0] for text in notes.texts] == ["warning", "ALARM"]
    assert "step 3: F(2) = 0.200 with 0% of the tokens replayed" in notes.texts[1]
    assert [row["alarm_f2"] for row in read_metrics(folder.metrics_file)] == [0.0, 1.0, 2.0]
    assert ended == [False, False, stops]


@pytest.mark.parametrize(("correction", "told"), [("tis", 1), ("none", 0)])
def test_replay_with_truncated_importance_sampling_starts_with_a_warning(
    tmp_path: Path, correction: str, told: int
) -> None:
    """Before anything is built: this run ends right after, for want of a policy."""
    config = RunConfig(
        name="r",
        run_root=str(tmp_path),
        policy=PolicyConfig(path=str(tmp_path / "no such policy")),
        tasks=TasksConfig(num_train=40, num_heldout=8),
        routing=RoutingConfig(replay="r3"),
        algorithm=AlgorithmConfig(correction=correction),  # type: ignore[arg-type]
    )
    folder, notes = RunFolder.create(config), Notes()
    with pytest.raises(AgentRLError, match="no such policy"):
        asyncio.run(run_training(config, folder, notes))
    folder.close()
    said = [text for text in notes.texts if text.startswith("warning: algorithm.correction=tis")]
    assert len(said) == told
