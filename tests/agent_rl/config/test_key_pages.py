"""The list of keys: complete, up to date, and readable one key at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_rl.commands.config import config_command
from agent_rl.config.key_pages import config_surface, reference_page, sections
from agent_rl.errors import ConfigError

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_every_key_is_listed_with_a_meaning() -> None:
    keys = [key for section in sections() for key in section.keys]
    assert sorted(key.name for key in keys) == sorted(
        line.partition(":")[0] for line in config_surface()
    )
    assert [key.name for key in keys if len(key.meaning) < 5] == []


def test_the_page_is_up_to_date() -> None:
    """Made anew by ``agent-rl config --markdown > docs/configuration.md``."""
    assert PAGE.read_text() == reference_page()


def test_types_ranges_defaults_and_meanings_come_from_where_the_key_is_declared() -> None:
    keys = {key.name: key for section in sections() for key in section.keys}
    assert keys["agent.max_turns"].default == "6"
    assert keys["engine.urls"].default == "[]"
    assert keys["trainer.packed"].default == "false"
    assert keys["algorithm.clip_low"].default == "null"
    assert keys["engine.urls"].only_for == "engine.kind=sglang and vllm"
    assert keys["engine.num_threads"].only_for == ""
    assert keys["engine.num_threads"].limits == "from 1 to 1024"
    assert keys["trainer.ray_address"].limits == "local, auto or HOST:PORT"
    assert keys["algorithm.clip_low"].expected == "float or null, from 0 to 1"
    assert keys["engine.dtype"].meaning.startswith("precision of weights and products.")
    assert keys["engine.dtype"].meaning.endswith("(a controlled experiment).")
    assert keys["name"].meaning == "the run's folder is run_root/name"


def test_the_command_lists_a_section_or_one_key(capsys: pytest.CaptureFixture[str]) -> None:
    config_command("routing", markdown=False)
    shown = capsys.readouterr().out
    assert "routing.replay" in shown
    assert "train.steps" not in shown
    assert "mixed is r3 with the live router" in shown.replace("`", "").replace("\n", " ")
    config_command("train.steps", markdown=False)
    shown = capsys.readouterr().out
    assert "train.steps" in shown
    assert "train.save_every" not in shown


def test_an_unknown_section_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean routing"):
        config_command("rooting", markdown=False)
