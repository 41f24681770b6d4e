"""A run's newest checkpoint as a policy folder of another precision."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agent_rl.config.schema import EngineConfig, PolicyConfig, RunConfig
from agent_rl.engines.local import LocalEngine
from agent_rl.errors import CheckpointError
from agent_rl.model.policies import policy_folder
from agent_rl.run.warmstart.export import export_policy
from agent_rl.store.run_folder import RunFolder
from agent_rl.trainer.checkpoint import CheckpointStore


def _run(root: Path) -> RunFolder:
    start = PolicyConfig(path="builtin:bench_dense")
    folder = RunFolder.create(RunConfig(name="made", run_root=str(root), policy=start))
    folder.close()
    return folder


def test_weights_are_the_checkpoints_in_the_wanted_precision(tmp_path: Path) -> None:
    run = _run(tmp_path)
    trained = policy_folder("builtin:tiny_moe") / "model.safetensors"

    def write(folder: Path) -> None:
        shutil.copyfile(trained, folder / "model.safetensors")

    CheckpointStore(run.checkpoints, keep_last=1).save(3, write)
    export_policy(run.path, tmp_path / "out")
    before, after = load_file(trained), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, before[name].to(torch.bfloat16))
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_a_run_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        export_policy(_run(tmp_path).path, tmp_path / "out")


@pytest.mark.parametrize("name", ["bench_moe32", "bench_moe8", "bench_dense"])
def test_shipped_exports_load_in_the_engine(name: str) -> None:
    engine = LocalEngine(policy_folder(f"builtin:{name}"), EngineConfig(max_sessions=8))
    assert engine.row_layout.num_moe_layers == 4
