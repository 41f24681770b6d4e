"""The picture of a run: what its curves hold, and that every run has one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from agent_rl.metrics.plots import _plot_mismatch, _plot_times, plot_run

STEP = {
    "step": 1,
    "resolve_rate": 0.5,
    "kl_k3_rollout_old": 7e-5,
    "kl_k3_replay": 1e-5,
    "kl_k3_no_replay": 1e-4,
    "f_2": 0.0,
    "router_flip_rate": 0.02,
    "time_generate_s": 1.0,
    "time_environment_s": 1.0,
    "time_train_s": 1.0,
}


def points(axes: Axes) -> list[list[float]]:
    """The curves of single steps, in the order of their drawing."""
    return [
        np.asarray(line.get_ydata()).tolist() for line in axes.lines if line.get_marker() == "."
    ]


def test_live_routers_are_set_beside_replay_on_the_same_samples() -> None:
    metrics = [STEP, STEP | {"step": 2, "kl_k3_replay": 3e-5, "kl_k3_no_replay": 3e-4}]
    axes = Figure().subplots()
    _plot_mismatch(axes, metrics)
    means = {line.get_label(): line.get_ydata() for line in axes.lines}
    assert means["a few samples, live routers"] == pytest.approx([1e-4, 2e-4])
    assert means["the same samples, replayed"] == pytest.approx([1e-5, 2e-5])
    assert points(axes) == [[7e-5, 7e-5], [1e-4, 3e-4], [1e-5, 3e-5]]
    assert not any("F(2)" in str(label) for label in means)


def test_steps_that_measured_nothing_break_the_line() -> None:
    without = {key: STEP[key] for key in STEP if not key.startswith("kl_")} | {"step": 2}
    axes = Figure().subplots()
    _plot_mismatch(axes, [STEP, without, STEP | {"step": 3}])
    for line in axes.lines:
        assert np.isnan(np.asarray(line.get_ydata())).tolist() == [False, True, False]


def test_a_slow_step_is_cut_off_and_said_so() -> None:
    axes = Figure().subplots()
    steps = [STEP | {"step": float(number)} for number in range(1, 10)]
    _plot_times(axes, [*steps, STEP | {"step": 10, "time_train_s": 98.0}])
    assert axes.get_ylim()[1] == pytest.approx(1.2 * 3 * 3.0)
    assert "1 of up to 100 s cut off" in axes.get_title()


@pytest.mark.parametrize(
    "metrics",
    [
        [],
        [STEP],
        [dict.fromkeys(STEP, 0.0) | {"step": 1}],  # engines that agree to the bit
        [{"step": 1, "resolve_rate": 1.0}],  # without signal: nothing was trained
        [STEP, {key: STEP[key] for key in STEP if not key.startswith("kl_")} | {"step": 2}],
    ],
)
def test_every_run_has_a_picture(tmp_path: Path, metrics: list[dict[str, float]]) -> None:
    file = tmp_path / "plots" / "run.png"
    plot_run(metrics, file, before=0.0, after=1.0, title="t")
    assert file.read_bytes().startswith(b"\x89PNG")
