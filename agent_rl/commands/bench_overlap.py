"""``agent-rl bench overlap``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from agent_rl.commands.figures import show_figures
from agent_rl.commands.terminal import make_console


def overlap(
    config: Annotated[Path, typer.Argument(help="a YAML configuration")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value")] = None,
    steps: Annotated[int, typer.Option(help="steps of each short run", min=4)] = 6,
    rounds: Annotated[int, typer.Option(help="paired runs", min=2)] = 4,
    json: Annotated[Path | None, typer.Option(help="also write flat JSON here")] = None,
) -> None:
    """A step with train.overlap_rollout against one without, from the same weights."""
    from agent_rl.bench.overlap import measure_overlap
    from agent_rl.config.reading import load_config

    console = make_console()
    loaded = load_config(config, overrides or [])
    measured = asyncio.run(
        measure_overlap(loaded, num_steps=steps, num_rounds=rounds, report=console.print)
    )
    show_figures(console, "the next rollout beside the update", measured.to_json(), json)
