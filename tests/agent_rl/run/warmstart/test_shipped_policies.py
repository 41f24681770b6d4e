"""Shipped policies are what their recipes say."""

from dataclasses import asdict
from pathlib import Path

import orjson
import pytest
from safetensors import safe_open
from transformers.utils import logging as hf_logging

from agent_rl.model.config_json import read_shape
from agent_rl.model.policies import builtin_policies, policy_folder
from agent_rl.run.warmstart.recipes import RECIPES
from agent_rl.run.warmstart.run import save_quietly
from agent_rl.run.warmstart.train import build_tiny_moe

SHIPPED = [name.removeprefix("builtin:") for name in builtin_policies()]


def test_every_recipe_has_its_policy() -> None:
    assert sorted(RECIPES) == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_the_policy_has_the_recipes_shape_and_precision(name: str) -> None:
    folder, recipe = policy_folder(f"builtin:{name}"), RECIPES[name]
    shape = read_shape(folder)
    wanted = recipe.shape
    assert (shape.num_layers, shape.num_experts) == (wanted.num_layers, wanted.num_experts)
    assert (shape.moe_top_k, shape.expert_width) == (wanted.moe_top_k, wanted.expert_width)
    noted = orjson.loads((folder / "warmstart.json").read_bytes())["recipe"]
    current = orjson.loads(orjson.dumps(asdict(recipe)))
    assert {key: current[key] for key in noted} == noted
    with safe_open(folder / "model.safetensors", "pt") as file:
        kinds = {file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118
    assert kinds == {"BF16" if recipe.dtype == "bfloat16" else "F32"}
    assert (folder / "model.safetensors").stat().st_size < 3_000_000


def test_a_policy_is_written_without_a_progress_bar(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    was_enabled = hf_logging.is_progress_bar_enabled()
    hf_logging.enable_progress_bar()
    try:
        save_quietly(build_tiny_moe(RECIPES["tiny_moe"].shape, 64, seed=0), tmp_path)
        assert hf_logging.is_progress_bar_enabled()  # others' switch is as it was
    finally:
        if not was_enabled:
            hf_logging.disable_progress_bar()
    assert (tmp_path / "model.safetensors").is_file()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", [n for n in SHIPPED if n.startswith("bench_")])
def test_bench_policies_use_the_same_number_of_units(name: str) -> None:
    shape = RECIPES[name].shape
    assert shape.moe_top_k * shape.expert_width == 128
    assert shape.num_layers == 4
