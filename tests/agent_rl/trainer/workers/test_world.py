"""How many processes a configuration means, and what it may not ask for."""

from __future__ import annotations

import pytest

from agent_rl.config.reading import config_from_dict
from agent_rl.config.rules import check_rules
from agent_rl.config.schema import TrainerConfig
from agent_rl.errors import ConfigError
from agent_rl.trainer.workers.world import chunk_blocks, fewest_processes, launcher, num_processes
from routing_cache import RowLayout


@pytest.mark.parametrize(
    ("sizes", "fewest"),
    [
        ({}, 1),
        ({"tensor_parallel": 2}, 2),
        ({"expert_parallel": 2}, 2),
        ({"tensor_parallel": 2, "expert_parallel": 2}, 2),
        ({"tensor_parallel": 2, "expert_parallel": 8}, 8),
        ({"pipeline_parallel": 2, "context_parallel": 2, "tensor_parallel": 3}, 12),
        ({"pipeline_parallel": 2, "tensor_parallel": 2, "expert_parallel": 4}, 8),
    ],
)
def test_the_fewest_processes_hold_every_parallel_size(sizes: dict[str, int], fewest: int) -> None:
    assert fewest_processes(TrainerConfig(**sizes)) == fewest
    assert num_processes(TrainerConfig(**sizes)) == fewest
    assert num_processes(TrainerConfig(**sizes, num_processes=3 * fewest)) == 3 * fewest


def test_one_process_is_the_driver_and_several_are_local_unless_told_otherwise() -> None:
    assert launcher(TrainerConfig()) == "inline"
    assert launcher(TrainerConfig(num_processes=2)) == "local"
    assert launcher(TrainerConfig(tensor_parallel=2)) == "local"
    assert launcher(TrainerConfig(launcher="local")) == "local"
    assert launcher(TrainerConfig(launcher="ray", num_processes=2)) == "ray"


def faults(**trainer: object) -> list[tuple[str, str]]:
    try:
        config = config_from_dict({"trainer": trainer})
    except ConfigError as error:
        return [(key, text) for _, key, text in (p.split(": ", 2) for p in error.problems)]
    return [(key, text) for key, text in check_rules(config) if key.startswith("trainer.")]


@pytest.mark.parametrize(
    ("trainer", "key", "text"),
    [
        ({"num_processes": -1}, "trainer.num_processes", "got -1 (int), expected int, from 0"),
        (
            {"num_processes": 3, "context_parallel": 2},
            "trainer.num_processes",
            "got 3, expected a multiple of 2, which the parallel sizes need (0 takes the fewest)",
        ),
        (
            {"launcher": "inline", "num_processes": 2},
            "trainer.launcher",
            "got inline for 2 processes, expected local or ray: the driver is one process",
        ),
        (
            {"worker_timeout_s": 0.0},
            "trainer.worker_timeout_s",
            "got 0.0 (float), expected float, above 0",
        ),
        (
            {"launcher": "ray", "ray_address": "http://head:6379"},
            "trainer.ray_address",
            "got 'http://head:6379' (str), expected local, auto or HOST:PORT",
        ),
        (
            {"ray_address": "head:6379"},
            "trainer.ray_address",
            "got 'head:6379', which only trainer.launcher=ray reads: expected local",
        ),
    ],
)
def test_a_wrong_setting_is_named_with_what_to_do(
    trainer: dict[str, object], key: str, text: str
) -> None:
    found = faults(**trainer)
    assert any(where == key and what.startswith(text) for where, what in found), found


def test_settings_that_fit_together_pass() -> None:
    assert faults(num_processes=4, expert_parallel=2) == []
    assert faults(launcher="local", num_processes=1) == []


def test_pipeline_chunks_cut_the_moe_layers_where_they_begin() -> None:
    every = RowLayout(8, tuple(range(8)), 16, 2)
    assert chunk_blocks(every, 1) is None
    assert chunk_blocks(every, 4) == (0, 2, 4, 6)
    dense_first = RowLayout(8, (3, 4, 5, 6, 7), 16, 2)
    assert chunk_blocks(dense_first, 4) == (0, 1, 3)
    assert chunk_blocks(RowLayout(4, (0,), 16, 2), 2) == (0,)
