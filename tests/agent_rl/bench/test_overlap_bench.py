"""The comparison of overlapping runs with those that take turns."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from agent_rl.bench.overlap import Run, measure_overlap, summarize, with_overlap
from agent_rl.config.reading import load_config
from agent_rl.config.rules import check_rules

CONFIG = Path(__file__).parents[3] / "configs" / "repair_tiny.yaml"


def test_ratios_are_of_the_same_round_and_the_bound_of_the_parts() -> None:
    turns = [Run(10.0, 6.0, 4.0, 6.0), Run(20.0, 12.0, 8.0, 12.0)]
    beside = [Run(6.0, 6.0, 4.0, 2.0), Run(16.0, 12.0, 8.0, 4.0)]
    bench = summarize(turns, beside)
    assert bench.beside_over_turns.median == pytest.approx((0.6 + 0.8) / 2)
    assert bench.best_possible == pytest.approx(0.6)
    flat = bench.to_json()
    assert flat["turns_step_s"] == 15.0
    assert flat["beside_wait_s"] == 3.0


@pytest.mark.slow
@pytest.mark.megatron
def test_both_kinds_of_run_are_played() -> None:
    small = ["algorithm.groups_per_step=2", "algorithm.group_size=4", "tasks.num_train=8"]
    small += ["tasks.num_heldout=4", "eval.num_tasks=4", "sandbox.num_workers=2"]
    config = load_config(CONFIG, small)
    for overlap in (True, False):
        kind = with_overlap(config, 4, overlap=overlap)
        assert check_rules(kind) == []
        assert kind.train == replace(config.train, steps=4, overlap_rollout=overlap)
    lines: list[str] = []
    bench = asyncio.run(measure_overlap(config, num_steps=4, num_rounds=2, report=lines.append))
    kinds = [line.split(", ")[1].split(":")[0] for line in lines]
    assert kinds == ["in turns", "beside", "beside", "in turns"]
    assert min(bench.to_json().values()) > 0
    assert 0.5 <= bench.best_possible < 1
