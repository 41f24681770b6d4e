"""``agent-rl warmstart``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from agent_rl.commands.terminal import make_console
from agent_rl.config.suggestions import command_line
from agent_rl.errors import ConfigError


def warmstart_command(folder: Path, recipe: str, seed: int | None, num_demos: int | None) -> None:
    """Train a starting policy and say how to measure it."""
    from agent_rl.run.warmstart.recipes import RECIPES
    from agent_rl.run.warmstart.run import warmstart

    if folder.exists() and any(folder.iterdir()):
        raise ConfigError([f"warmstart: got {folder}, which is not empty; expected a new folder"])
    if num_demos is not None and num_demos < 64:
        raise ConfigError([f"warmstart: got --num-demos {num_demos}, expected 64 or more"])
    if recipe not in RECIPES:
        raise ConfigError([f"warmstart: got --recipe {recipe}, expected one of {sorted(RECIPES)}"])
    config = RECIPES[recipe]
    config = replace(
        config,
        seed=config.seed if seed is None else seed,
        num_demos=config.num_demos if num_demos is None else num_demos,
    )
    console = make_console()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as progress:
        tasks = [progress.add_task(f"stage {n}", total=None, note="") for n in (1, 2)]

        def report(stage: int, step: int, num_steps: int, loss: float, tokens_per_s: float) -> None:
            note = f"loss {loss:.3f}, {tokens_per_s:,.0f} tokens/s"
            progress.update(tasks[stage - 1], completed=step, total=num_steps, note=note)

        record = warmstart(config, folder, report)
    console.print(
        f"{record['num_parameters']:,.0f} parameters in {record['wall_s']:.0f} s: {folder}",
        soft_wrap=True,
    )
    words = ("agent-rl", "eval", "configs/repair_tiny.yaml", f"policy.path={folder}")
    console.print(f"measure it: {command_line(*words)}", soft_wrap=True)
