"""What a person sees while a run is going: a live panel on a terminal, a line a step elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

# metric name, heading, format
_COLUMNS = (
    ("reward_mean", "reward", "{:.3f}"),
    ("resolve_rate", "resolved", "{:.1%}"),
    ("replayed_fraction", "replayed", "{:.1%}"),
    ("kl_k3_rollout_old", "KL", "{:.1e}"),
    ("f_2", "F(2)", "{:.1e}"),
    ("router_flip_rate", "router disagr.", "{:.2%}"),
    ("tokens_per_s", "tokens/s", "{:,.0f}"),
)
_TIMES = (("time_generate_s", "gen"), ("time_environment_s", "env"), ("time_train_s", "train"))


class Display(Protocol):
    """Observer of a run. ``activity`` is called often, ``step_done`` once a step."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def activity(self, what: str, done: int, total: int) -> None: ...

    def step_done(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None: ...

    def note(self, text: str) -> None: ...


def make_display(console: Console) -> Display:
    return LiveDisplay(console) if console.is_terminal else LineDisplay(console)


class Eta:
    """Remaining seconds from the average of the steps seen by this process."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._steps = 0

    def update(self, step: int, num_steps: int) -> float:
        self._steps += 1
        return (time.monotonic() - self._started) / self._steps * (num_steps - step)


class LineDisplay:
    """One line a step: for logs and pipes."""

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
        cells += [f"{name} {_format(metrics, key, form)}" for key, name, form in _COLUMNS]
        cells += [_times(metrics), f"ETA {clock(self._eta.update(step, num_steps))}"]
        self._console.print("  ".join(cells), soft_wrap=True, highlight=False)

    def note(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False)


class LiveDisplay:
    """The last steps as a table, the current activity and the whole run as bars."""

    def __init__(self, console: Console, num_rows: int = 12) -> None:
        self._console, self._num_rows, self._eta = console, num_rows, Eta()
        self._rows: list[tuple[int, dict[str, float]]] = []
        columns = (TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn())
        self._bars = Progress(*columns, TimeElapsedColumn(), TextColumn("{task.fields[eta]}"))
        self._run = self._bars.add_task("run", total=None, eta="")
        self._now = self._bars.add_task("starting", total=None, eta="")
        self._live = Live(self._render(), console=console, refresh_per_second=4)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.update(self._render())
        self._live.stop()

    def activity(self, what: str, done: int, total: int) -> None:
        self._bars.update(self._now, description=what, completed=done, total=total)

    def step_done(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        self._rows = [*self._rows, (step, dict(metrics))][-self._num_rows :]
        eta = f"ETA {clock(self._eta.update(step, num_steps))}"
        self._bars.update(self._run, completed=step, total=num_steps, eta=eta)
        self._live.update(self._render())

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False)

    def _render(self) -> Group:
        table = Table(expand=True, pad_edge=False)
        table.add_column("step", justify="right")
        for _, name, _ in _COLUMNS:
            table.add_column(name, justify="right")
        table.add_column("time split", justify="right")
        for step, metrics in self._rows:
            cells = [_format(metrics, key, form) for key, _, form in _COLUMNS]
            table.add_row(str(step), *cells, _times(metrics))
        return Group(table, self._bars)


def clock(seconds: float) -> str:
    """``h:mm:ss`` or ``m:ss``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _format(metrics: Mapping[str, float], key: str, form: str) -> str:
    return form.format(metrics[key]) if key in metrics else "-"


def _times(metrics: Mapping[str, float]) -> str:
    total = sum(metrics.get(key, 0.0) for key, _ in _TIMES)
    if total <= 0:
        return "-"
    parts = [f"{name} {metrics.get(key, 0.0) / total:.0%}" for key, name in _TIMES]
    return f"{total:.1f}s: " + " ".join(parts)
