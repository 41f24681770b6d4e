"""``agent-rl eval`` on the configuration's own held-out tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import orjson
from rich.console import Console

from agent_rl.commands.source import PolicySource, open_source
from agent_rl.commands.terminal import make_console
from agent_rl.metrics.display import make_display
from agent_rl.metrics.summary import Evaluation, evaluation_table
from agent_rl.run.evaluation import evaluate
from agent_rl.run.interrupt import run_interruptible
from agent_rl.run.parts import assemble_rollout
from agent_rl.store.run_folder import write_aside
from agent_rl.tasks.kinds import load_tasks


def evaluate_command(
    path: Path, overrides: Sequence[str], step: int | None, json_file: Path | None
) -> None:
    """Print the resolve rate by family, and write it to ``json_file``."""
    console = make_console()
    with open_source(path, overrides, console, step) as source:
        result = run_interruptible(_evaluate(console, source))
    split = source.config.tasks.heldout_split
    title = f"{source.description}: {split} tasks, temperature {source.config.eval.temperature:g}"
    console.print(evaluation_table(title, {"resolved": result}))
    if json_file is not None:
        write_aside(json_file, orjson.dumps(asdict(result), option=orjson.OPT_INDENT_2) + b"\n")


async def _evaluate(console: Console, source: PolicySource) -> Evaluation:
    wanted = load_tasks(source.config.tasks).heldout[: source.config.eval.num_tasks]
    rollout = assemble_rollout(source.config, source.policy)
    try:
        heldout = rollout.environments.admit(wanted)
        with make_display(console) as display:
            return await evaluate(
                rollout, heldout, on_progress=lambda n, m: display.activity("evaluating", n, m)
            )
    finally:
        await rollout.aclose()
