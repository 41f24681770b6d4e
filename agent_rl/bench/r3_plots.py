"""The two pictures of the evidence: probabilities against each other, and F(τ)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from agent_rl.bench.r3 import Measurement
from agent_rl.bench.r3_policies import CONTROL, JUDGED, Evidence
from agent_rl.metrics.mismatch import f_tau

_SHOWN = (
    (JUDGED, "off", "MoE, no replay", "#c0504d"),
    (JUDGED, "r3", "MoE, R3", "#1f4e79"),
    (CONTROL, "off", "dense control", "#6a8f3c"),
)
_ENGINES = (("bfloat16", "bfloat16 engine"), ("fp8_simulated", "fp8 engine (simulated)"))
_TAUS = 1 + np.geomspace(0.005, 9, 160)
_TICKS = (1.01, 1.05, 1.1, 1.5, 2.0, 5.0, 10.0)


def plot_scatter(evidence: Evidence, file: Path) -> None:
    """Every sampled token's probability in the rollout against training (the paper's figure 1)."""
    figure = Figure(figsize=(11, 7.4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("Probability of each sampled token: rollout against float32 training")
    axes = figure.subplots(len(_ENGINES), len(_SHOWN), sharex=True, sharey=True, squeeze=False)
    for row, (dtype, engine) in zip(axes, _ENGINES, strict=True):
        for axis, (policy, mode, label, colour) in zip(row, _SHOWN, strict=True):
            measured = evidence.of(policy, dtype, mode)
            _scatter(axis, measured, colour)
            axis.set_title(f"{label}, {engine}", fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel("probability in the rollout")
    for row in axes:
        row[0].set_ylabel("probability in training")
    _save(figure, file)


def _scatter(axis: Axes, measured: Measurement, colour: str) -> None:
    axis.plot((0, 1), (0, 1), color="#888888", lw=0.8, zorder=1)
    axis.scatter(
        np.exp(measured.rollout), np.exp(measured.train), s=3, color=colour, alpha=0.35, zorder=2
    )
    row = measured.row
    text = f"exact KL {row.kl_exact:.1e}\nF(1.1) {row.f_1_1:.1e}\n{row.num_tokens:,} tokens"
    axis.text(0.04, 0.96, text, transform=axis.transAxes, va="top", fontsize=8)
    axis.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    axis.grid(alpha=0.25)


def plot_f_tau(evidence: Evidence, file: Path) -> None:
    """Share of tokens whose ratio exceeds τ, over τ (the paper's figure 2)."""
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("F(τ): share of sampled tokens whose probabilities differ by more than τ times")
    axes = figure.subplots(1, len(_ENGINES), sharey=True, squeeze=False)[0]
    for axis, (dtype, engine) in zip(axes, _ENGINES, strict=True):
        for policy, mode, label, colour in _SHOWN:
            measured = evidence.of(policy, dtype, mode)
            shares = np.array([f_tau(measured.rollout, measured.train, tau) for tau in _TAUS])
            seen = shares > 0
            axis.plot(_TAUS[seen] - 1, shares[seen], color=colour, label=label)
        floor = 1 / evidence.of(JUDGED, dtype, "off").row.num_tokens
        axis.axhline(floor, color="#888888", lw=0.8, ls=":")
        axis.text(9, floor * 1.15, "one token", ha="right", fontsize=8, color="#666666")
        axis.set(title=engine, xlabel="τ", xscale="log", yscale="log")
        # Spaced by τ - 1: what happens close to 1 would be a single line otherwise.
        axis.set_xticks([tau - 1 for tau in _TICKS], [f"{tau:g}" for tau in _TICKS])
        axis.minorticks_off()
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("F(τ)")
    axes[0].legend(fontsize=9)
    _save(figure, file)


def _save(figure: Figure, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
