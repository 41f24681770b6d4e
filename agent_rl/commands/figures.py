"""The end of a benchmark: its figures as a table, and as a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table

from agent_rl.store.run_folder import write_aside


def show_figures(
    console: Console,
    title: str,
    figures: Mapping[str, object],
    json: Path | None,
    *,
    form: str = ",.4g",
) -> None:
    """Print ``figures``, floats in ``form``; also write them to ``json`` unless it is None."""
    table = Table(title=title, title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in figures.items():
        table.add_row(name, format(value, form) if isinstance(value, float) else str(value))
    console.print(table)
    if json is not None:
        write_aside(json, orjson.dumps(figures, option=orjson.OPT_INDENT_2) + b"\n")
