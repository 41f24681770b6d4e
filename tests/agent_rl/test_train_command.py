"""What a resumed run takes from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_rl.commands.train import _disk_full_as_error, _resumed
from agent_rl.config import RunConfig, TrainConfig, TrainerConfig
from agent_rl.config_io import load_resolved
from agent_rl.errors import ConfigError
from agent_rl.metrics.sink import MetricsSink
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
        ("train.steps=9", "train.steps: a resumed run cannot change it"),
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
