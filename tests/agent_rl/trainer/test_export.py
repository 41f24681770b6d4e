"""``agent-rl export``: a checkpoint's model as a folder that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from family_policies import load, write_family
from safetensors.torch import load_file, save_file

from agent_rl.commands.export import export_command
from agent_rl.errors import CheckpointError, ConfigError
from agent_rl.trainer.checkpoint import MANIFEST, CheckpointStore
from agent_rl.trainer.export import export_model
from agent_rl.trainer.folders import INDEX

pytestmark = pytest.mark.megatron


def test_the_newest_whole_checkpoint_of_a_run_is_exported(
    policy: Path, tmp_path: Path, make_trainer, capsys: pytest.CaptureFixture[str]
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
    with pytest.raises(CheckpointError, match="nothing to export"):
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


def test_an_export_that_fails_leaves_nothing(tmp_path: Path) -> None:
    source = write_family(tmp_path / "source", "mixtral")
    (source / "config.json").unlink()
    with pytest.raises(FileNotFoundError):
        export_model(source, tmp_path / "out", dtype="bfloat16")
    assert {path.name for path in tmp_path.iterdir()} == {"source"}
