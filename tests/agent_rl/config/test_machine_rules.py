"""What this machine lacks is told before anything starts, with a command that works here."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from agent_rl.config.rules import check_rules, check_rules_anywhere
from agent_rl.config.schema import EngineConfig, RunConfig, TrainerConfig

REPOSITORY = Path(__file__).parents[3]


def of_key(config: RunConfig, key: str) -> list[str]:
    return [text for found, text in check_rules(config) if found == key]


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_a_server_needs_its_environment(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENT_RL_ENGINES_DIR", str(tmp_path))
    config = RunConfig(engine=EngineConfig(kind=kind))  # type: ignore[arg-type]
    (text,) = of_key(config, "engine.kind")
    python = tmp_path / kind / "bin" / "python"
    assert f"got no {python}; build it with scripts/engines/install.sh {kind}" in text
    assert "AGENT_RL_ENGINES_DIR" in text
    assert "engine.urls" in text
    assert not [key for key, _ in check_rules_anywhere(config) if key == "engine.kind"]
    python.parent.mkdir(parents=True)
    python.touch()
    assert of_key(config, "engine.kind") == []


def test_servers_that_run_elsewhere_need_nothing_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENT_RL_ENGINES_DIR", str(tmp_path))
    remote = RunConfig(engine=EngineConfig(kind="sglang", urls=("http://rollout-0:30000",)))
    assert of_key(remote, "engine.kind") == []
    assert of_key(RunConfig(), "engine.kind") == []


def test_ray_that_is_not_installed_names_its_lock_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not there
    (text,) = of_key(RunConfig(trainer=TrainerConfig(launcher="ray")), "trainer.launcher")
    assert ".venv/bin/pip install -r requirements-cluster.lock" in text


def test_advice_installs_from_this_checkout() -> None:
    """``agent-rl`` in a registry would be whatever somebody put there."""
    named: set[str] = set()
    for folder in ("agent_rl", "eval", "envs", "routing_cache", "configs", "docs"):
        for file in (REPOSITORY / folder).rglob("*"):
            if file.suffix in (".py", ".yaml", ".md"):
                text = file.read_text()
                assert not re.search(r"pip install ['\"]?agent-rl", text), file
                named |= set(re.findall(r"requirements[a-z-]*\.lock", text))
    assert {"requirements-cluster.lock", "requirements-eval.lock"} <= named
    assert all((REPOSITORY / name).is_file() for name in named)
