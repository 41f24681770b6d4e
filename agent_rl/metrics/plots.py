"""The curves of a run as one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_INK, _FAINT = "#1f4e79", "#9db8d2"


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
    rate.plot(ends, (before, after), "o", color="#c0504d", label="held-out, before and after")
    for step, value in zip(ends, (before, after), strict=True):
        rate.annotate(f"{value:.2f}", (step, value), (4, -12), textcoords="offset points")
    rate.set(title="Resolve rate (temperature 1)", xlabel="step", ylim=(0, 1))
    rate.legend(loc="lower right", fontsize=8)

    for key, label, colour in (
        ("kl_k3_rollout_old", "k3 KL(rollout ‖ old policy)", _INK),
        ("kl_k3_no_replay", "the same without replay", "#e3b98c"),
        ("f_2", "F(2)", "#c0504d"),
    ):
        points = [(row["step"], row[key]) for row in metrics if row.get(key, 0.0) > 0]
        if points:
            mismatch.plot(*zip(*points, strict=True), ".-", color=colour, lw=1, ms=3, label=label)
    if mismatch.lines:
        mismatch.set_yscale("log")
        mismatch.legend(fontsize=8)
    mismatch.set(title="Rollout against training", xlabel="step")

    flips = [(row["step"], row["router_flip_rate"]) for row in metrics if "router_flip_rate" in row]
    if flips:
        router.plot(*zip(*flips, strict=True), color=_INK)
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
            colors=(_INK, _FAINT, "#e3b98c"),
        )
        split.legend(loc="upper right", fontsize=8)
    split.set(title="Seconds a step", xlabel="step")
    for axis in (rate, mismatch, router, split):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
