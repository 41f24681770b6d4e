"""``agent-rl bench trainer``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.table import Table

from agent_rl.store.run_folder import write_aside
from agent_rl.terminal import make_console


def trainer(
    rounds: Annotated[int, typer.Option(help="paired rounds of the three steps", min=2)] = 9,
    json: Annotated[Path | None, typer.Option(help="also write flat JSON here")] = None,
) -> None:
    """A step with replay against without, Megatron against transformers, bytes of routing rows."""
    from agent_rl.bench.trainer import measure_trainer

    console = make_console()
    flat = measure_trainer(num_rounds=rounds, report=console.print).to_json()
    table = Table(title="one RL step on one CPU thread", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in flat.items():
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) else f"{value}")
    console.print(table)
    if json is not None:
        write_aside(json, orjson.dumps(flat, option=orjson.OPT_INDENT_2) + b"\n")
