"""``agent-rl bench overlap``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.table import Table

from agent_rl.store.run_folder import write_aside
from agent_rl.terminal import make_console


def overlap(
    config: Annotated[Path, typer.Argument(help="a YAML configuration")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value")] = None,
    steps: Annotated[int, typer.Option(help="steps of each short run", min=4)] = 6,
    rounds: Annotated[int, typer.Option(help="paired runs", min=2)] = 4,
    json: Annotated[Path | None, typer.Option(help="also write flat JSON here")] = None,
) -> None:
    """A step with train.overlap_rollout against one without, from the same weights."""
    from agent_rl.bench.overlap import measure_overlap
    from agent_rl.config_io import load_config

    console = make_console()
    loaded = load_config(config, overrides or [])
    measured = asyncio.run(
        measure_overlap(loaded, num_steps=steps, num_rounds=rounds, report=console.print)
    )
    flat = measured.to_json()
    table = Table(title="the next rollout beside the update", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in flat.items():
        table.add_row(name, f"{value:,.4g}")
    console.print(table)
    if json is not None:
        write_aside(json, orjson.dumps(flat, option=orjson.OPT_INDENT_2) + b"\n")
