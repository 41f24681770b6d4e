"""The study: resumable, honest about failures, and able to see a collapse."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan
from pathlib import Path

import numpy as np
import orjson
import pytest
from matplotlib.figure import Figure

from agent_rl.config.rules import check_rules
from agent_rl.errors import AgentRLError
from agent_rl.store.run_folder import read_metrics
from agent_rl.study.cells import METHODS, Cell, Matrix, Setting
from agent_rl.study.collapse import outcomes, run_study, train_cell
from agent_rl.study.outcome import read_outcome
from agent_rl.study.report import draw_seeds, markdown, plot, to_json

SETTING = Setting(steps=12)
ONE_SEED = Matrix(seeds=(0,))


def _write(folder: Path, rates: list[float], *, failure: str = "") -> None:
    folder.mkdir(parents=True)
    rows = [
        {"step": i + 1, "resolve_rate": r, "kl_k3_rollout_old": 1e-3 * (i + 1), "f_2": 1e-4}
        for i, r in enumerate(rates)
    ]
    (folder / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(r) + b"\n" for r in rows))
    for name, rate in (("before", 0.4), ("after", rates[-1])):
        (folder / f"evaluation-{name}.json").write_bytes(orjson.dumps({"resolve_rate": rate}))
    end = {"error": failure} if failure else {}
    (folder / ("failure.json" if failure else "summary.json")).write_bytes(orjson.dumps(end))


def _runner(ran: list[str]) -> Callable[[Cell, Setting, Path], None]:
    def run(cell: Cell, setting: Setting, folder: Path) -> None:
        ran.append(cell.name)
        _write(folder / cell.name, [0.4 + 0.01 * i for i in range(setting.steps)])

    return run


def test_every_method_with_every_number_of_mini_steps_and_seed() -> None:
    made = Matrix().cells()
    assert len({c.name for c in made}) == len(made) == len(METHODS) * 2 * 3
    assert [c.seed for c in made] == sorted(c.seed for c in made)


@pytest.mark.parametrize("cell", ONE_SEED.cells(), ids=lambda cell: cell.name)
def test_a_cell_is_a_run_that_the_rules_accept(cell: Cell, tmp_path: Path) -> None:
    config = cell.config(SETTING, tmp_path)
    assert [f for f in check_rules(config) if not f[0].startswith("sandbox")] == []
    assert (config.routing.replay == "r3") == cell.method.endswith("_r3")
    assert (config.algorithm.correction == "tis") == cell.method.endswith("_tis")
    assert config.algorithm.num_mini_steps == cell.num_mini_steps


def test_finished_cells_are_skipped(tmp_path: Path) -> None:
    ran: list[str] = []
    todo = ONE_SEED.cells()
    _write(tmp_path / todo[3].name, [0.5] * 12)
    run_study(tmp_path, SETTING, ONE_SEED, report=print, run_cell=_runner(ran))
    assert ran == [c.name for i, c in enumerate(todo) if i != 3]
    again: list[str] = []
    assert len(
        run_study(tmp_path, SETTING, ONE_SEED, report=print, run_cell=_runner(again))
    ) == len(todo)
    assert again == []


def test_a_folder_holds_one_setting(tmp_path: Path) -> None:
    run_study(tmp_path, SETTING, ONE_SEED, report=print, run_cell=_runner([]))
    with pytest.raises(AgentRLError, match="another setting"):
        run_study(tmp_path, Setting(steps=13), ONE_SEED, report=print, run_cell=_runner([]))
    with pytest.raises(AgentRLError, match="another setting"):
        run_study(
            tmp_path, Setting(steps=12, lr=1e-3), ONE_SEED, report=print, run_cell=_runner([])
        )


def test_more_cells_of_the_setting_join_a_folder(tmp_path: Path) -> None:
    first = Matrix(methods=("grpo", "grpo_r3"), mini_steps=(4,), seeds=(0,))
    run_study(tmp_path, SETTING, first, report=print, run_cell=_runner([]))
    ran: list[str] = []
    wider = Matrix(methods=("grpo", "gspo", "grpo_r3"), mini_steps=(4, 8), seeds=(0, 1))
    found = run_study(tmp_path, SETTING, wider, report=print, run_cell=_runner(ran))
    assert len(found) == 12
    assert set(ran) == {c.name for c in wider.cells()} - {c.name for c in first.cells()}
    assert "| 8 | GSPO | 2 |" in markdown(found)


@pytest.mark.parametrize(
    ("rates", "failure", "collapsed"),
    [
        ([0.4] * 6 + [0.6] * 6, "", False),
        ([0.6] * 6 + [0.1] * 6, "", True),
        ([0.6] * 6 + [0.35] * 6, "", False),
        ([0.6] * 6, "the gradient is not finite", True),
    ],
)
def test_collapse_is_half_of_the_best_rate_or_a_broken_step(
    tmp_path: Path, rates: list[float], failure: str, collapsed: bool
) -> None:
    cell = ONE_SEED.cells()[0]
    _write(tmp_path / cell.name, rates, failure=failure)
    outcome = read_outcome(cell, tmp_path / cell.name)
    assert outcome is not None
    assert (outcome.collapsed, outcome.error) == (collapsed, failure)
    assert outcome.kl_first == pytest.approx(3e-3)
    assert outcome.best_rate == pytest.approx(max(rates[:5] + rates[-5:]), abs=0.2)


def test_steps_without_a_figure_are_left_out(tmp_path: Path) -> None:
    """No signal in any group: a step has no KL. Flipped sets are probed every few steps only."""
    cell, folder = ONE_SEED.cells()[0], tmp_path / ONE_SEED.cells()[0].name
    _write(folder, [0.5] * 20)
    rows = [{**row} for row in read_metrics(folder / "metrics.jsonl")]
    for row in rows:
        if row["step"] > 15:
            del row["kl_k3_rollout_old"]
        if row["step"] % 5 == 0:
            row["router_flip_rate_no_replay"] = row["step"] / 100
    (folder / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(r) + b"\n" for r in rows))
    outcome = read_outcome(cell, folder)
    assert outcome is not None
    assert outcome.kl_last == pytest.approx(13e-3)
    assert outcome.flips_first == pytest.approx(0.05)
    assert outcome.flips_last == pytest.approx((0.10 + 0.15 + 0.20) / 3)
    assert [isnan(value) for value in outcome.curve.kl] == [False] * 15 + [True] * 5
    figure = Figure()
    axis = figure.subplots()
    draw_seeds(axis, [outcome, outcome], "flips", "black", "GRPO")
    np.testing.assert_array_equal(axis.lines[-1].get_xdata(), [5, 10, 15, 20])
    assert "| 5% | 15% |" in markdown([outcome])


def test_an_unfinished_cell_has_no_outcome(tmp_path: Path) -> None:
    cell = ONE_SEED.cells()[0]
    (tmp_path / cell.name).mkdir()
    assert read_outcome(cell, tmp_path / cell.name) is None


def test_table_and_picture_cover_what_is_there(tmp_path: Path) -> None:
    for cell in ONE_SEED.cells()[:7]:
        _write(tmp_path / cell.name, [0.4] * 12)
    found = outcomes(tmp_path, ONE_SEED)
    table = markdown(found).splitlines()
    assert len(table) == 2 + 7
    assert all(line.count("|") == table[0].count("|") for line in table)
    assert "| 4 | GRPO + TIS | 1 |" in table[-1]
    flat = to_json(found, SETTING)
    assert (flat["num_cells"], flat["steps"]) == (7, 12)
    assert flat["grpo-m1-s0_after"] == 0.4
    plot(found, SETTING, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_real_cell_leaves_everything_that_an_outcome_reads(tmp_path: Path) -> None:
    setting = Setting(steps=2, groups_per_step=3, group_size=4, num_eval=4)
    cell = Cell("grpo_r3", 1, 0)
    train_cell(cell, setting, tmp_path)
    rows = read_metrics(tmp_path / cell.name / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert any({"kl_k3_rollout_old", "f_2"} <= row.keys() for row in rows)
    outcome = read_outcome(cell, tmp_path / cell.name)
    assert outcome is not None
    assert outcome.kl_first > 0
    assert outcome.error == ""
