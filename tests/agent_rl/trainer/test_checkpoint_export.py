"""``agent-rl export``: a checkpoint's model as a folder that transformers loads."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from family_policies import load, write_family
from fixture_types import MakeTrainer
from safetensors.torch import load_file, save_file

from agent_rl.commands.export import export_command
from agent_rl.errors import CheckpointError, ConfigError
from agent_rl.model.folders import INDEX
from agent_rl.trainer.checkpoint import MANIFEST, CheckpointStore
from agent_rl.trainer.checkpoint_export import export_model
from agent_rl.trainer.checkpoint_reading import CheckpointGoneError

pytestmark = pytest.mark.megatron


def test_the_newest_whole_checkpoint_of_a_run_is_exported(
    policy: Path, tmp_path: Path, make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, run = make_trainer(), tmp_path / "run"
    store = CheckpointStore(run / "checkpoints")
    first = store.save(1, trainer.save)
    (store.save(2, trainer.save) / "config.json").unlink()
    export_command(run, tmp_path / "out", None, None)
    assert "step-00000002 not used: config.json is missing" in capsys.readouterr().out
    files = {file.name for file in (tmp_path / "out").iterdir()}
    assert files == {"config.json", "generation_config.json", "model.safetensors"}
    ours, source = load(tmp_path / "out").state_dict(), load(policy).state_dict()
    assert all(torch.equal(ours[name], tensor) for name, tensor in source.items())
    # Tied in the policy: engines that do not tie would sample from nothing.
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    export_command(first, tmp_path / "again", None, "bfloat16")
    assert load_file(tmp_path / "again" / "model.safetensors")["lm_head.weight"].dtype == (
        torch.bfloat16
    )
    assert json.loads((tmp_path / "again" / "config.json").read_text())["dtype"] == "bfloat16"
    export_command(run, tmp_path / "one", 1, None)
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        export_command(run, tmp_path / "two", 2, None)
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        export_command(tmp_path / "out", tmp_path / "three", None, None)
    with pytest.raises(ConfigError, match="exists"):
        export_command(run, tmp_path / "out", None, None)
    with pytest.raises(ConfigError, match="--dtype"):
        export_command(run, tmp_path / "four", None, "int4")
    assert MANIFEST not in files


def test_several_files_keep_their_index_and_biases_their_precision(tmp_path: Path) -> None:
    source, parts = write_family(tmp_path / "source", "deepseek_v3"), tmp_path / "parts"
    parts.mkdir()
    tensors = load_file(source / "model.safetensors")
    names = sorted(tensors)
    halves = (names[::2], names[1::2])
    for number, half in enumerate(halves, 1):
        file = parts / f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in half}, file)
    (parts / "config.json").write_text((source / "config.json").read_text())
    export_model(parts, tmp_path / "out", dtype="bfloat16")
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert set(index["weight_map"]) == set(tensors)
    exported = load(tmp_path / "out").state_dict()
    for name, tensor in load(source).state_dict().items():
        bias = name.endswith("e_score_correction_bias")
        expected = tensor if bias else tensor.bfloat16().float()
        assert torch.equal(exported[name], expected), name


def test_no_weights_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    with pytest.raises(CheckpointError, match="without weights"):
        export_model(tmp_path / "source", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


class At:
    """Does something before a file operation of a given number, once."""

    def __init__(self) -> None:
        self._left, self._act = -1, lambda: None
        sys.addaudithook(self._count)  # for as long as this process lives, idle when not armed

    def _count(self, event: str, arguments: object) -> None:
        if self._left >= 0 and event in ("open", "os.mkdir", "os.scandir", "os.rename"):
            self._left -= 1
            if self._left < 0:
                self._act()

    @contextlib.contextmanager
    def operation(self, number: int, act: Callable[[], object]) -> Iterator[None]:
        self._left, self._act = number, act
        yield
        self._left = -1


@pytest.fixture(scope="module")
def at() -> At:
    return At()


@pytest.mark.parametrize("number", range(12))
def test_a_run_that_goes_on_may_remove_what_is_exported(
    tmp_path: Path, at: At, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whenever a save pushes the only checkpoint out, a whole model is exported all the same."""
    old, new = (write_family(tmp_path / f"{n}", "mixtral", seed=n) for n in (1, 2))
    store = CheckpointStore(tmp_path / "run" / "checkpoints", keep_last=1)

    def save(step: int, policy: Path) -> Path:
        return store.save(step, lambda folder: shutil.copytree(policy, folder, dirs_exist_ok=True))

    first = save(1, old)
    with at.operation(number, lambda: save(2, new)):
        export_command(tmp_path / "run", tmp_path / "out", None, None)
    assert not first.exists()
    exported = load_file(tmp_path / "out" / "model.safetensors")
    whole = [load_file(folder / "model.safetensors") for folder in (old, new)]
    assert any(all(torch.equal(exported[n], t) for n, t in tensors.items()) for tensors in whole)
    assert (tmp_path / "out" / "config.json").is_file()
    assert "no checkpoint" not in capsys.readouterr().out


def test_a_checkpoint_that_was_named_and_goes_is_an_error(tmp_path: Path, at: At) -> None:
    source, moved = write_family(tmp_path / "source", "mixtral"), tmp_path / "moved"
    with at.operation(1, lambda: source.rename(moved)), pytest.raises(CheckpointGoneError):
        export_model(source, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"moved"}


def test_an_export_that_fails_leaves_nothing(tmp_path: Path) -> None:
    source = write_family(tmp_path / "source", "mixtral")
    (source / "config.json").unlink()
    with pytest.raises(FileNotFoundError):
        export_model(source, tmp_path / "out", dtype="bfloat16")
    assert {path.name for path in tmp_path.iterdir()} == {"source"}
