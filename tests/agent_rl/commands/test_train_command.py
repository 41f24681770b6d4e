"""What a resumed run takes from the command line."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from agent_rl.commands.train import (
    _disk_full_as_error,
    _replay_rows,
    _resumed,
    finished_summary,
    train_command,
)
from agent_rl.config.reading import dump_config, load_config, load_resolved
from agent_rl.config.schema import RunConfig, TrainConfig, TrainerConfig
from agent_rl.errors import ConfigError, EngineError
from agent_rl.metrics.sink import MetricsSink
from agent_rl.metrics.summary import Evaluation, Summary, summarize
from agent_rl.model.policies import policy_folder
from agent_rl.run import training_run
from agent_rl.run.interrupt import Interrupted
from agent_rl.store.run_folder import RunFolder, RunFolderError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = RunFolder.create(RunConfig(name="r", run_root=str(tmp_path)))
    folder.close()
    return folder.path


def test_a_run_may_go_on_with_another_layout_and_keeps_it(run: Path) -> None:
    overrides = ["trainer.expert_parallel=2", "trainer.num_processes=4", "train.keep_last=1"]
    folder, config = _resumed(run, overrides)
    folder.close()
    assert config == RunConfig(
        name="r",
        run_root=str(run.parent),
        trainer=TrainerConfig(expert_parallel=2, num_processes=4),
        train=TrainConfig(keep_last=1),
    )
    assert load_resolved(run / "config.yaml") == config
    folder, again = _resumed(run, [])
    folder.close()
    assert again == config


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optim.lr=1e-3", "optim.lr: a resumed run cannot change it; expected trainer"),
        ("train.eval_every=9", "train.eval_every: a resumed run cannot change it"),
        ("train.steps=0", r"train.steps: got 0 \(int\), expected int, 1 or more"),
        ("trainer.dtype=bfloat16", "trainer.dtype: a resumed run cannot change it"),
        ("seed=1", "seed: a resumed run cannot change it"),
        ("trainer.num_procs=2", "did you mean trainer.num_processes"),
        ("trainer.num_processes=two", "num_processes: got 'two'"),
        ("trainer.sequence_parallel=true", "expected false when trainer.tensor_parallel is 1"),
    ],
)
def test_what_changes_the_result_is_refused_and_nothing_is_written(
    run: Path, override: str, words: str
) -> None:
    before = (run / "config.yaml").read_bytes()
    with pytest.raises(ConfigError, match=words):
        _resumed(run, [override])
    assert (run / "config.yaml").read_bytes() == before
    folder, _ = RunFolder.open(run)  # it was released
    folder.close()


def test_a_full_disk_is_one_line_that_says_how_to_go_on(tmp_path: Path) -> None:
    with (
        pytest.raises(RunFolderError, match=rf"No space left.*got=\d+ bytes.*--resume {tmp_path}"),
        _disk_full_as_error(tmp_path),
        MetricsSink(Path("/dev/full"), tmp_path / "tensorboard") as sink,
    ):
        sink.log(1, {"loss": 1.0})
    with pytest.raises(PermissionError), _disk_full_as_error(tmp_path):
        raise PermissionError(13, "not this one")


def finished(run: Path, *, steps: int, completed: bool = True) -> Summary:
    """Leave a summary in ``run`` as its end would."""
    rows = [{"step": step, "time_step_s": 60.0} for step in range(1, steps + 1)]
    before, after = (Evaluation(rate, 8, 0, {}, 2.0) for rate in (0.25, 0.75))
    summary = summarize("r", 0, rows, before, after, completed=completed)
    folder, _ = RunFolder.open(run)
    folder.write_summary(summary.to_json())
    folder.close()
    return summary


def test_resuming_a_finished_run_shows_its_result_and_does_nothing(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is no checkpoint and no policy in this folder: a run that started would train anew."""
    finished(run, steps=TrainConfig().steps)
    kept = {file: file.read_bytes() for file in run.iterdir()}
    train_command(None, [], run)
    out = capsys.readouterr().out.replace("\n", "")
    assert f"{run} is complete: its {TrainConfig().steps} steps are done" in out
    assert "0.750" in out
    assert {file: file.read_bytes() for file in run.iterdir()} == kept
    folder, _ = RunFolder.open(run)  # it was released
    folder.close()


def test_a_run_with_something_left_to_do_is_not_finished(run: Path) -> None:
    folder, config = RunFolder.open(run)
    assert finished_summary(folder, config) is None  # it has not ended yet
    folder.summary_file.write_text("{")
    assert finished_summary(folder, config) is None
    folder.close()
    finished(run, steps=config.train.steps, completed=False)
    assert finished_summary(folder, config) is None  # a time limit ended it
    finished(run, steps=config.train.steps - 1)
    assert finished_summary(folder, config) is None
    expected = finished(run, steps=config.train.steps)
    assert finished_summary(folder, config) == expected


def test_a_finished_run_may_get_more_steps_and_no_fewer_than_it_has(run: Path) -> None:
    folder, config = RunFolder.open(run)
    folder.close()
    finished(run, steps=config.train.steps)
    with MetricsSink(run / "metrics.jsonl", run / "tensorboard") as sink:
        for step in (1, 2, 3):
            sink.log(step, {"time_step_s": 1.0})
    folder, longer = _resumed(run, ["train.steps=120"])
    assert longer.train.steps == 120
    assert finished_summary(folder, longer) is None
    folder.close()
    kept = (run / "config.yaml").read_bytes()
    with pytest.raises(ConfigError, match="got 2, expected at least the 3 steps"):
        _resumed(run, ["train.steps=2"])
    assert (run / "config.yaml").read_bytes() == kept
    folder, _ = RunFolder.open(run)  # it was released
    folder.close()


def test_a_refused_change_names_the_run_that_would_do_it(run: Path) -> None:
    for step in (9, 10):
        shutil.copytree(policy_folder("builtin:tiny_moe"), run / "checkpoints" / f"step-{step:08d}")
    with pytest.raises(ConfigError) as refused:
        _resumed(run, ["optim.lr=1e-5"])
    (problem,) = refused.value.problems
    newest = run / "checkpoints" / "step-00000010"
    command = f"agent-rl train {run / 'config.yaml'} policy.path={newest} optim.lr=VALUE"
    assert problem.endswith(command)
    overrides = command.replace("VALUE", "1e-5").split()[3:]
    config = load_config(run / "config.yaml", overrides)  # it can be started
    assert (config.policy.path, config.optim.lr) == (str(newest), 1e-5)


def test_the_folder_of_a_run_is_no_configuration_and_the_error_says_what_to_do(run: Path) -> None:
    with pytest.raises(ConfigError, match=f"agent-rl train --resume {run}; to start another"):
        train_command(run, [], None)
    (run / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"got a folder, expected a YAML config$"):
        train_command(run, [], None)


def test_the_end_of_a_run_compares_replay_on_the_same_samples(run: Path) -> None:
    summary = replace(finished(run, steps=1), kl_mean=9e-5)
    assert _replay_rows(summary) == []
    paired = replace(summary, kl_replay_mean=1e-5, kl_no_replay_mean=4e-4)
    assert [value for _, value in _replay_rows(paired)] == ["1.00e-05", "4.00e-04"]
    assert "same samples" in _replay_rows(paired)[1][0]
    alone = replace(summary, kl_no_replay_mean=4e-4)
    assert [name.strip() for name, _ in _replay_rows(alone)] == ["of a few samples, live routers"]


def start_that_ends_with(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, begun: bool
) -> Path:
    """Run ``train`` on a configuration whose run raises ``error``; returns its folder."""

    async def ends(config: RunConfig, folder: RunFolder, *_: object, **__: object) -> None:
        if begun:
            folder.metrics_file.write_text("")
        raise error

    monkeypatch.setattr(training_run, "run_training", ends)
    config = tmp_path / "c.yaml"
    config.write_text(dump_config(RunConfig(name="r", run_root=str(tmp_path))))
    with pytest.raises(type(error)):
        train_command(config, [], None)
    return tmp_path / "r"


@pytest.mark.parametrize("error", [ConfigError(["no tasks"]), EngineError("gone"), ValueError("?")])
def test_a_start_that_fails_leaves_no_folder_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    assert not start_that_ends_with(error, tmp_path, monkeypatch, begun=False).exists()


def test_a_failure_after_the_start_keeps_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = start_that_ends_with(EngineError("gone"), tmp_path, monkeypatch, begun=True)
    assert (folder / "config.yaml").is_file()


@pytest.mark.parametrize("error", [Interrupted(), KeyboardInterrupt()])
def test_the_first_and_the_second_ctrl_c_say_how_to_go_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
) -> None:
    folder = start_that_ends_with(error, tmp_path, monkeypatch, begun=True)
    assert f"agent-rl train --resume {folder}" in capsys.readouterr().out.replace("\n", "")
