"""The display of a run in progress: a live panel on a terminal, one line per step elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol, Self

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

_BEHIND = "staleness_max"  # shown only where a rollout was of older weights
# metric name, heading, format
_COLUMNS = (
    ("reward_mean", "reward", "{:.3f}"),
    ("resolve_rate", "resolved", "{:.1%}"),
    ("replayed_fraction", "replayed", "{:.1%}"),
    ("kl_k3_rollout_old", "KL", "{:.1e}"),
    ("f_2", "F(2)", "{:.1e}"),
    ("router_flip_rate", "router disagr.", "{:.2%}"),
    (_BEHIND, "behind", "{:.0f}"),
    ("tokens_per_s", "tokens/s", "{:,.0f}"),
)
_TIMES = (("time_generate_s", "gen"), ("time_environment_s", "env"), ("time_train_s", "train"))
_SPLIT = "time split"
_MOST_ROWS, _LINES_BESIDE_ROWS = 12, 5  # two bars, heading, rule, and one for the cursor
_COLUMN_GAP = 2
_ETA_STEPS = 20


class Display(Protocol):
    """Observer of a run. ``activity`` is called often, ``step_done`` once per step."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def activity(self, what: str, done: int, total: int) -> None: ...

    def step_done(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None: ...

    def note(self, text: str) -> None: ...


def make_display(console: Console) -> Display:
    return LiveDisplay(console) if console.is_terminal else LineDisplay(console)


class Eta:
    """Remaining seconds from what the last steps took themselves.

    Loading, evaluations and checkpoints are no part of a step, so they are no part of this.
    """

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_ETA_STEPS)

    def update(self, step: int, num_steps: int, step_s: float) -> float:
        self._seconds.append(step_s)
        return sum(self._seconds) / len(self._seconds) * (num_steps - step)

    def text(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> str:
        return f"ETA {clock(self.update(step, num_steps, metrics['time_step_s']))}"


class LineDisplay:
    """One line per step: for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console, self._eta = console, Eta()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def activity(self, what: str, done: int, total: int) -> None:
        return None

    def step_done(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        cells = [f"step {step}/{num_steps}"]
        cells += [
            f"{name} {_format(metrics, key, form)}"
            for key, name, form in _COLUMNS
            if key != _BEHIND or metrics.get(key)
        ]
        cells += [_times(metrics), self._eta.text(step, num_steps, metrics)]
        self._console.print("  ".join(cells), soft_wrap=True, highlight=False)

    def note(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False)


class LiveDisplay:
    """The whole run and the current activity as bars, and below them the last steps as a table.

    Laid out for the terminal as it is at the moment: on a small one fewer columns and rows are
    shown, and no figure is cut.
    """

    def __init__(self, console: Console) -> None:
        self._console, self._eta = console, Eta()
        self._rows: list[tuple[int, dict[str, float]]] = []
        self._bars = Progress(
            TextColumn("{task.description:<20}", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[eta]:<11}", markup=False),
            expand=True,
        )
        self._run = self._bars.add_task("run", total=None, eta="")
        self._now = self._bars.add_task("starting", total=None, eta="")
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def activity(self, what: str, done: int, total: int) -> None:
        self._bars.update(self._now, description=what, completed=done, total=total)

    def step_done(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        self._rows = [*self._rows, (step, dict(metrics))][-_MOST_ROWS:]
        eta = self._eta.text(step, num_steps, metrics)
        self._bars.update(self._run, completed=step, total=num_steps, eta=eta)
        self._live.refresh()

    def note(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False)

    def _render(self) -> Group:
        width, height = self._console.size
        rows = self._rows[-max(1, height - _LINES_BESIDE_ROWS) :]
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        columns = _columns_that_fit(rows, width)
        for heading in columns:
            table.add_column(heading, justify="right", no_wrap=True)
        for cells in zip(*columns.values(), strict=True):
            table.add_row(*cells)
        return Group(self._bars, table) if rows else Group(self._bars)


def _columns_that_fit(
    rows: Sequence[tuple[int, Mapping[str, float]]], width: int
) -> dict[str, list[str]]:
    """Heading -> cells, at most ``width`` wide: a narrow terminal goes without the least useful."""
    columns = {"step": [str(step) for step, _ in rows]}
    for key, heading, form in (*_COLUMNS, ("time_step_s", "s/step", "{:.1f}")):
        columns[heading] = [_format(metrics, key, form) for _, metrics in rows]
    if not any(metrics.get(_BEHIND) for _, metrics in rows):
        del columns["behind"]
    columns[_SPLIT] = [_shares(metrics) for _, metrics in rows]
    # Rewards of 0 and 1 have the resolve rate as their mean.
    same = all(metrics.get("reward_mean") == metrics.get("resolve_rate") for _, metrics in rows)
    dispensable = [_SPLIT, *(["resolved"] if same else []), "tokens/s", "resolved", "s/step"]
    for heading in dispensable:
        wanted = [max(map(len, (name, *cells))) for name, cells in columns.items()]
        if sum(wanted) + _COLUMN_GAP * (len(wanted) - 1) <= width:
            break
        columns.pop(heading, None)
    return columns


def clock(seconds: float) -> str:
    """``h:mm:ss`` or ``m:ss``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _format(metrics: Mapping[str, float], key: str, form: str) -> str:
    return form.format(metrics[key]) if key in metrics else "-"


def _times(metrics: Mapping[str, float]) -> str:
    return f"{metrics['time_step_s']:.1f}s: {_shares(metrics)}"


def _shares(metrics: Mapping[str, float]) -> str:
    total = sum(metrics.get(key, 0.0) for key, _ in _TIMES)
    if total <= 0:
        return "-"
    return " ".join(f"{name} {metrics.get(key, 0.0) / total:.0%}" for key, name in _TIMES)
