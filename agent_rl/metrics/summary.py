"""The end of a run in one record: what was reached, how long it took, how faithful replay was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from rich.table import Table

from agent_rl.metrics.intervals import wilson


@dataclass(frozen=True)
class Evaluation:
    """Resolve rate on held-out tasks; ``num_infrastructure`` of them could not be judged."""

    resolve_rate: float
    num_trajectories: int
    num_infrastructure: int
    by_family: Mapping[str, tuple[int, int]]  # family -> (resolved, trajectories)
    turns_mean: float

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval of the resolve rate."""
        return wilson(self.resolve_rate * self.num_trajectories, self.num_trajectories)


@dataclass(frozen=True)
class Summary:
    """The contents of ``summary.json``. Times are of the training steps, evaluation left out."""

    name: str
    seed: int
    steps: int
    resolve_rate_before: float
    resolve_rate_after: float
    resolve_rate_after_low: float
    resolve_rate_after_high: float
    num_heldout: int
    train_wall_s: float
    replayed_fraction: float
    kl_mean: float
    f2_max: float
    completed: bool
    # Over the steps that measured it, on the same few samples; 0 where it was not measured.
    kl_replay_mean: float = 0.0  # the trainer with the recorded rows
    kl_no_replay_mean: float = 0.0  # with live routers
    staleness_mean: float = 0.0  # weight versions between a rollout and its update
    num_alarms: int = 0  # steps whose F(2) was at 0.05 or above

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Summary:
        """Read what ``to_json`` gave. Raises ``TypeError`` when a required field is absent."""
        return cls(**{field.name: tree[field.name] for field in fields(cls) if field.name in tree})


def summarize(
    name: str,
    seed: int,
    metrics: Sequence[Mapping[str, float]],
    before: Evaluation,
    after: Evaluation,
    *,
    completed: bool,
) -> Summary:
    """Put a run's metrics and its two evaluations together.

    ``replayed_fraction`` is over all fed tokens, ``kl_mean`` the mean of the steps' k3
    estimates over all trained tokens, ``f2_max`` the largest F(2) of any step.
    ``kl_replay_mean`` and ``kl_no_replay_mean`` compare the same tokens: those of the steps that
    measured both, or without rows those of the steps that measured the second.
    """
    trained = [row for row in metrics if row.get("num_tokens", 0) > 0]
    num_fed = sum(row["num_fed_tokens"] for row in trained)
    replayed = sum(row["replayed_fraction"] * row["num_fed_tokens"] for row in trained)
    kls = [row["kl_k3_rollout_old"] for row in trained]
    probed = [row for row in trained if "kl_k3_no_replay" in row]
    paired = [row for row in probed if "kl_k3_replay" in row]
    low, high = after.interval
    return Summary(
        name=name,
        seed=seed,
        steps=len(metrics),
        resolve_rate_before=before.resolve_rate,
        resolve_rate_after=after.resolve_rate,
        resolve_rate_after_low=low,
        resolve_rate_after_high=high,
        num_heldout=after.num_trajectories,
        train_wall_s=sum(row["time_step_s"] for row in metrics),
        replayed_fraction=replayed / num_fed if num_fed else 0.0,
        kl_mean=_mean(kls),
        f2_max=max((row["f_2"] for row in trained), default=0.0),
        completed=completed,
        kl_replay_mean=_mean([row["kl_k3_replay"] for row in paired]),
        kl_no_replay_mean=_mean([row["kl_k3_no_replay"] for row in paired or probed]),
        staleness_mean=_mean([row.get("staleness", 0.0) for row in trained]),
        num_alarms=sum(row.get("alarm_f2", 0.0) >= 1 for row in trained),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def evaluation_table(title: str, columns: Mapping[str, Evaluation]) -> Table:
    """Resolve rates by family, one column an evaluation."""
    table = Table(title=title, title_justify="left")
    table.add_column("tasks")
    for name in columns:
        table.add_column(name, justify="right")
    families = sorted({family for e in columns.values() for family in e.by_family})
    for family in families:
        cells = [_rate(*e.by_family.get(family, (0, 0))) for e in columns.values()]
        table.add_row(family, *cells)
    table.add_section()
    totals = [
        f"{e.resolve_rate:.3f}  [{e.interval[0]:.3f}, {e.interval[1]:.3f}]  n={e.num_trajectories}"
        for e in columns.values()
    ]
    table.add_row("all, with 95 % interval", *totals, style="bold")
    if any(e.num_infrastructure for e in columns.values()):
        counts = [str(e.num_infrastructure) for e in columns.values()]
        table.add_row("not judged (infrastructure)", *counts, style="yellow")
    return table


def _rate(resolved: int, total: int) -> str:
    return f"{resolved / total:.2f} ({resolved}/{total})" if total else "-"
