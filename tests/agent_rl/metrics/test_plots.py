"""The picture of a run: what its curves hold, and that every run has one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from agent_rl.metrics.plots import _plot_mismatch, plot_run

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


def test_live_routers_are_set_beside_replay_on_the_same_samples() -> None:
    metrics = [STEP, STEP | {"step": 2, "kl_k3_replay": 3e-5, "kl_k3_no_replay": 3e-4}]
    axes = Figure().subplots()
    _plot_mismatch(axes, metrics)
    curves = {line.get_label(): line.get_ydata() for line in axes.lines}
    assert np.array_equal(curves["a few samples, replayed"], [1e-5, 3e-5])
    assert np.array_equal(curves["the same samples, live routers"], [1e-4, 3e-4])
    assert np.array_equal(curves["k3 KL(rollout ‖ old policy)"], [7e-5, 7e-5])
    assert not any("F(2)" in str(label) for label in curves)


@pytest.mark.parametrize(
    "metrics",
    [
        [],
        [STEP],
        [{"step": 1, "resolve_rate": 1.0}],  # without signal: nothing was trained
        [STEP, {key: STEP[key] for key in STEP if not key.startswith("kl_")} | {"step": 2}],
    ],
)
def test_every_run_has_a_picture(tmp_path: Path, metrics: list[dict[str, float]]) -> None:
    file = tmp_path / "plots" / "run.png"
    plot_run(metrics, file, before=0.0, after=1.0, title="t")
    assert file.read_bytes().startswith(b"\x89PNG")
