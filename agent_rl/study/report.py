"""The study's table, as Markdown and JSON, and its curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from math import isnan
from pathlib import Path
from statistics import median

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from agent_rl.study.cells import METHODS, Setting
from agent_rl.study.outcome import F2_ALARM, Outcome

_COLOURS = {
    "grpo": "#c0504d",
    "grpo_tis": "#e3b98c",
    "gspo": "#8064a2",
    "grpo_r3": "#1f4e79",
    "gspo_r3": "#6a8f3c",
}
_HEAD = (
    "| mini-steps | method | seeds | held-out before | held-out after (each seed) | median after "
    "| training, best 5 steps | training, last 5 "
    "| KL, first 5 steps | KL, last 5 steps | largest F(2) "
    "| sets flipped, first probe | sets flipped, last 3 | collapsed |"
)

_FIGURES = (
    "before",
    "after",
    "best_rate",
    "last_rate",
    "kl_first",
    "kl_last",
    "f2_max",
    "flips_first",
    "flips_last",
)


def of_kind(outcomes: Sequence[Outcome], method: str, num_mini_steps: int) -> list[Outcome]:
    """The seeds of one row of the table."""
    return [
        o for o in outcomes if (o.cell.method, o.cell.num_mini_steps) == (method, num_mini_steps)
    ]


def mini_steps(outcomes: Sequence[Outcome]) -> list[int]:
    """Of the rows there are, ascending."""
    return sorted({o.cell.num_mini_steps for o in outcomes})


def markdown(outcomes: Sequence[Outcome]) -> str:
    """One row a method and number of mini-steps, over the seeds that have finished."""
    lines = [_HEAD, "|" + "---|" * (_HEAD.count("|") - 1)]
    for mini in mini_steps(outcomes):
        for name, method in METHODS.items():
            seeds = of_kind(outcomes, name, mini)
            if seeds:
                lines.append(f"| {mini} | {method.title} | " + " | ".join(_columns(seeds)) + " |")
    return "\n".join(lines) + "\n"


def _columns(seeds: Sequence[Outcome]) -> list[str]:
    return [
        str(len(seeds)),
        f"{median(o.before for o in seeds):.3f}",
        ", ".join(f"{o.after:.3f}" for o in seeds),
        f"{median(o.after for o in seeds):.3f}",
        f"{median(o.best_rate for o in seeds):.2f}",
        f"{median(o.last_rate for o in seeds):.2f}",
        f"{median(o.kl_first for o in seeds):.1e}",
        f"{median(o.kl_last for o in seeds):.1e}",
        f"{max(o.f2_max for o in seeds):.1e}",
        f"{median(o.flips_first for o in seeds):.0%}",
        f"{median(o.flips_last for o in seeds):.0%}",
        f"{sum(o.collapsed for o in seeds)} of {len(seeds)}",
    ]


def to_json(outcomes: Sequence[Outcome], setting: Setting) -> dict[str, float | bool | str]:
    """The setting, and flat keys ``<cell>_<figure>``."""
    flat: dict[str, float | bool | str] = {**asdict(setting), "num_cells": len(outcomes)}
    for o in outcomes:
        for name in _FIGURES:
            flat[f"{o.cell.name}_{name}"] = getattr(o, name)
        flat[f"{o.cell.name}_collapsed"] = o.collapsed
    return flat


def plot(outcomes: Sequence[Outcome], setting: Setting, file: Path) -> None:
    """Training rate, KL, F(2) and flipped sets; the median over seeds thick, each seed thin."""
    rows = mini_steps(outcomes) or [1]
    figure = Figure(figsize=(16, 0.4 + 3.1 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        f"Stability: {setting.engine_dtype} engine, float32 trainer, learning rate "
        f"{setting.lr:g}, {setting.groups_per_step} x {setting.group_size} trajectories per step"
    )
    axes = figure.subplots(len(rows), 4, squeeze=False)
    for row, mini in zip(axes, rows, strict=True):
        for name, method in METHODS.items():
            seeds = of_kind(outcomes, name, mini)
            for axis, key in zip(row, ("resolve_rate", "kl", "f_2", "flips"), strict=True):
                draw_seeds(axis, seeds, key, _COLOURS[name], method.title)
        noun = "mini-step" if mini == 1 else "mini-steps"
        row[0].set(title=f"Training resolve rate, {mini} {noun}", ylim=(0, 1))
        row[1].set(title="k3 KL(rollout ‖ old policy)", yscale="log")
        row[2].set(title="F(2)")
        row[2].set_yscale("symlog", linthresh=1e-4)
        row[3].set(title="Sets the live router would change", ylim=(0, 1))
        row[2].axhline(F2_ALARM, color="#888888", lw=0.8, ls=":")
        for axis in row:
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    if outcomes:
        named = axes[0][0].get_legend_handles_labels()
        axes[0][3].legend(*named, fontsize=8, loc="upper right")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def draw_seeds(axis: Axes, seeds: Sequence[Outcome], key: str, colour: str, label: str) -> None:
    """Mutating: one figure of ``Curve``, each seed thin and their median thick."""
    by_step: dict[float, list[float]] = {}
    for outcome in seeds:
        pairs = zip(outcome.curve.steps, getattr(outcome.curve, key), strict=True)
        measured = {step: value for step, value in pairs if not isnan(value)}
        axis.plot([*measured], [*measured.values()], color=colour, lw=0.6, alpha=0.4)
        for step, value in measured.items():
            by_step.setdefault(step, []).append(value)
    steps = sorted(by_step)
    middle = [median(by_step[step]) for step in steps]
    if steps:
        axis.plot(steps, middle, color=colour, lw=1.8, label=label)
