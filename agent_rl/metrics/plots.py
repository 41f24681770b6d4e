"""The curves of a run as one picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, PercentFormatter

_INK, _FAINT, _SAND, _RED = "#1f4e79", "#9db8d2", "#e3b98c", "#c0504d"
_WINDOW = 10  # steps of a mean
# metric, label, colour
_MISMATCH = (
    ("kl_k3_rollout_old", "k3 KL(rollout ‖ old policy)", _FAINT),
    ("kl_k3_no_replay", "a few samples, live routers", _SAND),
    ("kl_k3_replay", "the same samples, replayed", _INK),
)
_TIMES = (
    ("time_generate_s", "generate", _INK),
    ("time_environment_s", "environment", _FAINT),
    ("time_train_s", "train", _SAND),
)
_SLOW = 3.0  # times the median: a slower step is cut off, so that it does not flatten the others

Metrics = Sequence[Mapping[str, float]]


def plot_run(metrics: Metrics, file: Path, *, before: float, after: float, title: str) -> None:
    """Draw resolve rate, mismatch, router disagreement and time of every step, as PNG."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    rate, mismatch, router, times = figure.subplots(2, 2).flat
    _plot_rate(rate, metrics, before, after)
    _plot_mismatch(mismatch, metrics)
    _plot_router(router, metrics)
    _plot_times(times, metrics)
    for axes in (rate, mismatch, router, times):
        axes.set_xlabel("step")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def _plot_rate(axes: Axes, metrics: Metrics, before: float, after: float) -> None:
    steps = [row["step"] for row in metrics]
    resolved = [row["resolve_rate"] for row in metrics]
    axes.plot(steps, resolved, color=_FAINT, lw=1, label="training tasks, each step")
    axes.plot(steps, _means(resolved), color=_INK, lw=2, label=f"mean of {_WINDOW} steps")
    ends = (steps[0] - 1, steps[-1]) if steps else (0, 0)
    axes.plot(ends, (before, after), "o", color=_RED, label="held-out, before and after")
    for step, value in zip(ends, (before, after), strict=True):
        axes.annotate(
            f"{value:.2f}",
            (step, value),
            (0, 14 if value < 0.9 else -20),  # clear of the point and of the title
            textcoords="offset points",
            ha="center",
            bbox={"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.85},
        )
    axes.set(title="Resolve rate (temperature 1)", ylabel="share of trajectories", ylim=(0, 1))
    axes.legend(loc="lower right", fontsize=8)


def _plot_mismatch(axes: Axes, metrics: Metrics) -> None:
    """Draw live routers and replay on the same few samples of a step; F(2) where it is not 0."""
    for key, label, colour in _MISMATCH:
        _plot_measured(axes, metrics, key, label, colour)
    f2 = [(row["step"], row["f_2"]) for row in metrics if row.get("f_2", 0.0) > 0]
    if f2:
        axes.plot(*zip(*f2, strict=True), "x", color=_RED, ms=4, label="F(2), where not 0")
    axes.set(
        title=f"Rollout against training (mean of {_WINDOW} steps)",
        ylabel="KL (nats), F(2) (share of tokens)",
    )
    if any(row.get(key, 0.0) > 0 for row in metrics for key, _, _ in _MISMATCH):
        axes.set_yscale("log", nonpositive="mask")
        axes.yaxis.set_minor_formatter(NullFormatter())
        low, high = axes.get_ylim()
        decades = math.floor(math.log10(low)), math.ceil(math.log10(high))
        axes.set_ylim(10.0 ** decades[0], 10.0 ** (decades[1] + 1))  # room for the legend
    if axes.lines:
        axes.legend(fontsize=8, loc="upper right", ncols=2)


def _plot_router(axes: Axes, metrics: Metrics) -> None:
    _plot_measured(axes, metrics, "router_flip_rate", "", _INK)
    axes.set(
        title=f"Sets that the live router would change (mean of {_WINDOW} steps)",
        ylabel="share of expert sets",
    )
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=1))
    if axes.lines:
        axes.set_ylim(bottom=0)


def _plot_measured(axes: Axes, metrics: Metrics, key: str, label: str, colour: str) -> None:
    """Draw a point per step that measured ``key``, and a line of means that breaks elsewhere."""
    values = [row.get(key, math.nan) for row in metrics]
    if not all(map(math.isnan, values)):
        steps = [row["step"] for row in metrics]
        axes.plot(steps, values, ".", color=colour, ms=5, mew=0, alpha=0.5)
        axes.plot(steps, _means(values), color=colour, lw=1.8, label=label)


def _means(values: Sequence[float]) -> list[float]:
    """Return at every value the mean of the last steps, NaN where the value is NaN itself."""
    windows = (values[max(0, i + 1 - _WINDOW) : i + 1] for i in range(len(values)))
    return [
        math.nan if math.isnan(window[-1]) else fmean(v for v in window if not math.isnan(v))
        for window in windows
    ]


def _plot_times(axes: Axes, metrics: Metrics) -> None:
    axes.set(title="Work in a step", ylabel="seconds")
    if not metrics:
        return
    steps = [row["step"] for row in metrics]
    parts = [[row.get(key, 0.0) for row in metrics] for key, _, _ in _TIMES]
    labels, colours = [label for _, label, _ in _TIMES], [colour for _, _, colour in _TIMES]
    axes.stackplot(steps, parts, labels=labels, colors=colours)
    totals = [sum(step) for step in zip(*parts, strict=True)]
    most = min(max(totals), _SLOW * median(totals)) or 1.0
    slow = [total for total in totals if total > most]
    if slow:
        axes.set_title(f"Work in a step ({len(slow)} of up to {max(slow):,.0f} s cut off)")
    axes.set_ylim(0, 1.2 * most)  # room for the legend
    axes.legend(loc="upper right", fontsize=8, ncols=3)
