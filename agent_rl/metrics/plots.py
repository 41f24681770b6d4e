"""The curves of a run as one picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

_INK, _FAINT, _SAND, _RED = "#1f4e79", "#9db8d2", "#e3b98c", "#c0504d"
# metric, label, colour, style
_MISMATCH = (
    ("kl_k3_rollout_old", "k3 KL(rollout ‖ old policy)", _FAINT, "-"),
    ("kl_k3_replay", "a few samples, replayed", _INK, ".-"),
    ("kl_k3_no_replay", "the same samples, live routers", _SAND, ".-"),
    ("f_2", "F(2), where not 0", _RED, "x"),
)


def _averaged(values: Sequence[float], window: int) -> list[float]:
    return [
        sum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))
    ]


def plot_run(
    metrics: Sequence[Mapping[str, float]], file: Path, *, before: float, after: float, title: str
) -> None:
    """Resolve rate, mismatch, router disagreement and time of every step, as PNG."""
    steps = [row["step"] for row in metrics]
    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    rate, mismatch, router, split = figure.subplots(2, 2).flat

    resolved = [row["resolve_rate"] for row in metrics]
    rate.plot(steps, resolved, color=_FAINT, lw=1, label="training tasks, each step")
    rate.plot(steps, _averaged(resolved, 10), color=_INK, lw=2, label="mean of 10 steps")
    ends = (steps[0] - 1, steps[-1]) if steps else (0, 0)
    rate.plot(ends, (before, after), "o", color=_RED, label="held-out, before and after")
    for step, value in zip(ends, (before, after), strict=True):
        rate.annotate(
            f"{value:.2f}",
            (step, value),
            (0, 14 if value < 0.9 else -20),  # clear of the point and of the title
            textcoords="offset points",
            ha="center",
            bbox={"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.85},
        )
    rate.set(title="Resolve rate (temperature 1)", xlabel="step", ylim=(0, 1))
    rate.legend(loc="lower right", fontsize=8)

    _plot_mismatch(mismatch, metrics)
    mismatch.set(title="Rollout against training", xlabel="step")

    flips = [(row["step"], row["router_flip_rate"]) for row in metrics if "router_flip_rate" in row]
    if flips:
        router.plot(*zip(*flips, strict=True), color=_INK)
        router.set_ylim(bottom=0)
    router.set(
        title="Router disagreement (sets the live router would change)",
        xlabel="step",
        ylabel="share",
    )

    keys = ("time_generate_s", "time_environment_s", "time_train_s")
    shares = [[row.get(key, 0.0) for row in metrics] for key in keys]
    if steps:
        split.stackplot(
            steps,
            shares,
            labels=("generate", "environment", "train"),
            colors=(_INK, _FAINT, _SAND),
        )
        longest = max(map(sum, zip(*shares, strict=True)))
        split.set_ylim(0, 1.2 * longest or 1.0)  # room for the legend
        split.legend(loc="upper right", fontsize=8, ncols=3)
    split.set(title="Seconds of work per step", xlabel="step")
    for axis in (rate, mismatch, router, split):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def _plot_mismatch(axes: Axes, metrics: Sequence[Mapping[str, float]]) -> None:
    """Replay and live routers on the same few samples of a step; F(2) where it is not 0."""
    for key, label, colour, style in _MISMATCH:
        points = [(row["step"], row[key]) for row in metrics if row.get(key, 0.0) > 0]
        if points:
            axes.plot(*zip(*points, strict=True), style, color=colour, lw=1, ms=3, label=label)
    if axes.lines:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
        low, high = axes.get_ylim()
        decades = math.floor(math.log10(low)), math.ceil(math.log10(high))
        axes.set_ylim(10.0 ** decades[0], 10.0 ** (decades[1] + 1))  # room for the legend
        axes.legend(fontsize=8, loc="upper right", ncols=2)
