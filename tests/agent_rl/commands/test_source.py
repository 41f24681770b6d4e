"""Commands that read the policy of a run: it may go on meanwhile and remove what they read."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from agent_rl.commands.source import from_checkpoint, open_source
from agent_rl.commands.terminal import make_console
from agent_rl.config.reading import dump_config
from agent_rl.config.schema import RunConfig
from agent_rl.engines.local import LocalEngine
from agent_rl.errors import CheckpointError
from agent_rl.model.policies import policy_folder
from agent_rl.rollout.compact_tokenizer import CompactTokenizer
from agent_rl.trainer.checkpoint import CheckpointStore
from agent_rl.trainer.checkpoint_reading import CheckpointGoneError, held


class Run:
    """A run that is going on and keeps one checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        (path / "config.yaml").write_text(dump_config(RunConfig()))
        self.store = CheckpointStore(path / "checkpoints", keep_last=1)

    def save(self, step: int) -> Path:
        def write(folder: Path) -> None:
            shutil.copytree(policy_folder("builtin:tiny_moe"), folder, dirs_exist_ok=True)
            (folder / "step.txt").write_text(str(step))
            (folder / "trainer").mkdir()
            (folder / "trainer" / "state").write_bytes(b"large")

        return self.store.save(step, write)

    def readers(self) -> list[str]:
        return [path.name for path in self.path.glob(".reading-*")]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def test_a_policy_is_read_whole_although_the_run_removed_its_checkpoint(run: Run) -> None:
    first = run.save(1)
    with open_source(run.path, [], make_console()) as source:
        run.save(2)
        assert not first.exists()
        assert source.description.endswith("run, step 1")
        assert (source.policy / "step.txt").read_text() == "1"
        assert not (source.policy / "trainer").exists()
        CompactTokenizer.load(source.policy)
        LocalEngine(source.policy)
    assert not run.readers()


def test_the_newest_is_taken_again_when_it_goes_meanwhile(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.save(1)
    seen: list[str] = []

    def take(checkpoint: Path) -> str:
        seen.append(checkpoint.name)
        if len(seen) < 3:
            run.save(len(seen) + 1)
        with held(checkpoint) as folder:
            return (folder / "step.txt").read_text()

    assert from_checkpoint(run.path, None, make_console(), take) == "3"
    assert seen == ["step-00000001", "step-00000002", "step-00000003"]
    assert capsys.readouterr().out.count("was removed while it was read; taking the newest") == 2
    assert not run.readers()


def test_a_step_that_was_asked_for_and_goes_is_an_error(run: Run) -> None:
    run.save(1)

    def take(checkpoint: Path) -> None:
        run.save(2)
        with held(checkpoint):
            raise AssertionError("it is not there any more")

    with pytest.raises(CheckpointGoneError, match="step-00000001 was removed"):
        from_checkpoint(run.path, 1, make_console(), take)
    with (
        pytest.raises(CheckpointError, match=r"got=no such checkpoint expected=one of \[2\]"),
        open_source(run.path, [], make_console(), 1),
    ):
        pass


def test_what_a_killed_reader_left_is_removed_and_a_living_readers_folder_stays(run: Run) -> None:
    run.save(1)
    ownerless = run.path / ".reading-killed"
    ownerless.mkdir()
    (ownerless / ".lock").touch()
    with held(run.path / "checkpoints" / "step-00000001") as folder:
        for path in (ownerless, folder.parent):
            os.utime(path, (0, 0))
        with open_source(run.path, [], make_console()):
            assert not ownerless.exists()
            assert (folder / "step.txt").read_text() == "1"
            assert len(run.readers()) == 2


def test_trouble_of_the_reader_is_not_taken_for_a_checkpoint_that_went(run: Run) -> None:
    run.save(1)
    with pytest.raises(FileNotFoundError), open_source(run.path, [], make_console()) as source:
        (source.policy / "absent").read_text()
    assert not run.readers()
