"""docs/metrics.md explains every key that a step writes, and none that no step writes."""

from __future__ import annotations

import asyncio
import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from agent_rl.config.schema import AlgorithmConfig, EvalConfig, RunConfig, TasksConfig, TrainConfig
from agent_rl.metrics.display import LineDisplay
from agent_rl.run.training_run import run_training
from agent_rl.store.run_folder import RunFolder, read_metrics

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


def glossary(page: str) -> list[str]:
    """The keys in the first column of the tables that are headed ``key``."""
    found: list[str] = []
    is_keys = False
    for line in page.splitlines():
        cells = line.split(" | ")
        is_keys = line == "| key | meaning |" or (is_keys and line.startswith("|"))
        if is_keys and line.startswith("| `"):
            found += re.findall(r"`([^`]+)`", cells[0])
    return found


def pattern(key: str) -> re.Pattern[str]:
    """``<n>`` is a number, another ``<word>`` is one."""
    parts = re.split(r"(<\w+>)", key)
    words = {"<n>": r"\d+"}
    return re.compile(
        "".join(words.get(p, r"\w+") if p.startswith("<") else re.escape(p) for p in parts)
    )


def test_a_key_is_explained_once() -> None:
    keys = glossary(PAGE.read_text())
    assert len(keys) > 80
    assert len(set(keys)) == len(keys)
    assert pattern("ended_<reason>").fullmatch("ended_max_turns")
    assert not pattern("router_flip_rate/layer_<n>").fullmatch("router_flip_rate/layer_x")


@pytest.mark.slow
@pytest.mark.megatron
def test_a_step_writes_what_is_explained_and_nothing_else(tmp_path: Path) -> None:
    """A real step with everything switched on that adds a key."""
    config = RunConfig(
        run_root=str(tmp_path),
        tasks=TasksConfig(num_train=8, num_heldout=4),
        algorithm=AlgorithmConfig(
            groups_per_step=6,
            correction="tis",
            kl_weight=0.01,
            entropy_weight=0.01,
            router_consistency_weight=0.5,
        ),
        train=TrainConfig(steps=1, eval_every=1),
        eval=EvalConfig(num_tasks=4),
    )
    folder = RunFolder.create(config)
    with LineDisplay(Console(file=io.StringIO())) as display:
        asyncio.run(run_training(config, folder, display))
    folder.close()
    (row,) = read_metrics(folder.metrics_file)
    keys = [pattern(key) for key in glossary(PAGE.read_text())]
    assert [name for name in row if not any(key.fullmatch(name) for key in keys)] == []
    unseen = [key.pattern for key in keys if not any(key.fullmatch(name) for name in row)]
    assert unseen == []
