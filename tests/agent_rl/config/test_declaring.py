"""Sections check what code gives them, as they check what files hold."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, asdict, fields, replace
from typing import get_args, get_type_hints

import pytest

from agent_rl.config import AgentConfig, EngineConfig, RunConfig, TasksConfig, TrainConfig
from agent_rl.config.declaring import only_for
from agent_rl.config.reading import config_from_dict
from agent_rl.config.schema import ROWS
from agent_rl.errors import ConfigError
from envs.actions import FORMATS, TOOL_SETS
from eval.config import AgentLoopConfig


def test_a_section_made_in_code_is_checked_alike() -> None:
    with pytest.raises(
        ConfigError, match=r"^TrainConfig: steps: got 0 \(int\), expected int, 1 or"
    ):
        TrainConfig(steps=0)
    with pytest.raises(ConfigError, match="did you mean save_every"):
        TrainConfig(save_evry=1)
    with pytest.raises(ConfigError, match="expected a list of str"):
        replace(RunConfig().engine, urls=["http://a:1"])  # type: ignore[arg-type]


def test_a_section_is_a_frozen_dataclass_like_any_other() -> None:
    config = RunConfig(train=TrainConfig(steps=7))
    with pytest.raises(FrozenInstanceError):
        config.train.steps = 8  # type: ignore[misc]
    assert config == RunConfig(train=TrainConfig(steps=7)) != RunConfig()
    assert hash(config) == hash(pickle.loads(pickle.dumps(config)))
    assert config_from_dict(asdict(config)) == config
    assert {item.name: item.default for item in fields(EngineConfig)}["urls"] == ()


@pytest.mark.parametrize("name", ["a", ".a", "...", "a b", "..a", "-"])
def test_a_run_may_have_the_name_of_a_folder(name: str) -> None:
    assert RunConfig(name=name).name == name


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/", "../a"])
def test_a_run_has_no_name_that_leads_elsewhere(name: str) -> None:
    with pytest.raises(ConfigError, match="expected a plain folder name"):
        RunConfig(name=name)


def test_keys_say_for_what_they_are_read() -> None:
    rows = [item.name for item in fields(TasksConfig) if only_for(item) == ROWS]
    assert rows == ["rows", "rows_split", "heldout_fraction"]


@pytest.mark.parametrize("section", [AgentConfig, AgentLoopConfig])
def test_formats_and_tools_are_those_there_are(section: type) -> None:
    hints = get_type_hints(section)
    assert set(get_args(hints["action_format"])) == set(FORMATS)
    assert set(get_args(hints["tools"])) == set(TOOL_SETS)
