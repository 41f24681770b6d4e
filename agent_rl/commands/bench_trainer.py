"""``agent-rl bench trainer``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agent_rl.commands.figures import show_figures
from agent_rl.commands.terminal import make_console


def trainer(
    rounds: Annotated[int, typer.Option(help="paired rounds of the three steps", min=2)] = 9,
    json: Annotated[Path | None, typer.Option(help="also write flat JSON here")] = None,
) -> None:
    """A step with replay and without, by Megatron and transformers; bytes and checks of rows."""
    from agent_rl.bench.trainer import measure_trainer

    console = make_console()
    flat = measure_trainer(num_rounds=rounds, report=console.print).to_json()
    show_figures(console, "one RL step on one CPU thread", flat, json)
