"""Places where a policy may lie, and the words about one that is not there."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from agent_rl.errors import ConfigError
from agent_rl.model.policies import policy_folder


def refused(path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        policy_folder(path)
    (problem,) = caught.value.problems
    return problem


def test_a_policy_without_one_of_its_shards_is_missing(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "a.safetensors"):
        (tmp_path / name).write_text("{}")
    weight_map = {"x": "a.safetensors", "y": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "expected a folder with b.safetensors in it" in refused(str(tmp_path))
    (tmp_path / "b.safetensors").write_bytes(b"1234")
    assert policy_folder(str(tmp_path)) == tmp_path


def test_a_name_that_is_no_repository_is_a_configuration_error() -> None:
    assert refused("hf:a/b/c").startswith("policy.path: got hf:a/b/c")


def test_what_is_said_can_be_done(tmp_path: Path) -> None:
    """A shell takes the command as it is; a name like the Hub's is first taken for one."""
    where = tmp_path / "my models"
    command = refused(str(where)).rpartition("; fetch it: ")[2]
    words = ["hf", "download", "ORG/NAME", "--local-dir", str(where)]
    assert shlex.split(command) == words
    assert refused("Qwen/Qwen3-30B-A3B").endswith("Hugging Face Hub: hf:Qwen/Qwen3-30B-A3B")
    assert refused("hf:nobody/absent").endswith("; download it: hf download nobody/absent")
