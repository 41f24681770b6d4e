"""The outcome of a finished cell: held-out rate, mismatch, and whether it collapsed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import median

import orjson

from agent_rl.store.run_folder import read_metrics
from agent_rl.study.cells import Cell

_FLIPS = "router_flip_rate_no_replay"
_WINDOW = 5  # steps that a rate or a mismatch is averaged over
COLLAPSED_BELOW = 0.5  # of the best training rate so far
F2_ALARM = 0.1  # arXiv 2510.11370: runs collapsed beyond it


@dataclass(frozen=True)
class Curve:
    """One figure of every step; NaN where a step has none (no group with a signal, not probed)."""

    steps: tuple[float, ...]
    resolve_rate: tuple[float, ...]
    kl: tuple[float, ...]  # k3 of rollout against old policy
    f_2: tuple[float, ...]
    flips: tuple[float, ...]  # (token, layer) sets that the trainer's live router would change


@dataclass(frozen=True)
class Outcome:
    """``collapsed``: the training rate of the last five steps is below half of the best five, or
    the trainer stopped on a loss or gradient that was not finite."""

    cell: Cell
    before: float  # held-out resolve rates
    after: float
    best_rate: float  # of training, best mean of five steps
    last_rate: float  # mean of the last five
    kl_first: float  # median k3 of the first five steps: a mean would be that of one token
    kl_last: float
    f2_max: float
    flips_first: float  # at the first probe and, on average, at the last three; NaN without any
    flips_last: float
    collapsed: bool
    error: str
    curve: Curve


def read_outcome(cell: Cell, folder: Path) -> Outcome | None:
    """The outcome of a finished cell below ``folder``; None when it has not finished."""
    summary_file, failure = folder / "summary.json", folder / "failure.json"
    if not summary_file.is_file() and not failure.is_file():
        return None
    metrics = read_metrics(folder / "metrics.jsonl")
    error = "" if not failure.is_file() else str(orjson.loads(failure.read_bytes())["error"])
    before, after = (_held_out(folder / f"evaluation-{name}.json") for name in ("before", "after"))
    rates = [row["resolve_rate"] for row in metrics]
    means = [_mean(rates[i : i + _WINDOW]) for i in range(max(1, len(rates) - _WINDOW + 1))]
    kls = _series(metrics, "kl_k3_rollout_old")
    flips = _series(metrics, _FLIPS)
    best, last = max(means), _mean(rates[-_WINDOW:])
    return Outcome(
        cell=cell,
        before=before,
        after=after,
        best_rate=best,
        last_rate=last,
        kl_first=median(kls[:_WINDOW] or [0.0]),
        kl_last=median(kls[-_WINDOW:] or [0.0]),
        f2_max=max(_series(metrics, "f_2"), default=0.0),
        flips_first=flips[0] if flips else nan,
        flips_last=_mean(flips[-3:]) if flips else nan,
        collapsed=bool(error) or last < COLLAPSED_BELOW * best,
        error=error,
        curve=Curve(
            steps=tuple(row["step"] for row in metrics),
            resolve_rate=tuple(rates),
            kl=tuple(row.get("kl_k3_rollout_old", nan) for row in metrics),
            f_2=tuple(row.get("f_2", nan) for row in metrics),
            flips=tuple(row.get(_FLIPS, nan) for row in metrics),
        ),
    )


def _held_out(file: Path) -> float:
    """0 for an evaluation that a failed cell never reached."""
    return float(orjson.loads(file.read_bytes())["resolve_rate"]) if file.is_file() else 0.0


def _series(metrics: Sequence[Mapping[str, float]], key: str) -> list[float]:
    return [row[key] for row in metrics if key in row]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
