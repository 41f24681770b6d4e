"""``agent-rl study``: experiments of many runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer
from rich.console import Console

from agent_rl.store.run_folder import write_aside

if TYPE_CHECKING:
    from agent_rl.study.outcome import Outcome

study_app = typer.Typer(help="Experiments of many runs, resumable.", no_args_is_help=True)


@study_app.callback()
def study() -> None:
    """Experiments of many runs, resumable."""


@study_app.command(
    epilog="Example: agent-rl study collapse runs/collapse (again to continue, "
    "--show for what has finished)"
)
def collapse(
    folder: Annotated[Path, typer.Argument(help="where the runs and the results go")] = Path(
        "runs/collapse"
    ),
    seeds: Annotated[int, typer.Option(help="seeds of every method")] = 3,
    steps: Annotated[int, typer.Option(help="training steps of every run")] = 25,
    engine: Annotated[
        str, typer.Option(help="bfloat16, fp8_simulated or int4_simulated")
    ] = "int4_simulated",
    show: Annotated[bool, typer.Option("--show", help="run nothing, sum up")] = False,
) -> None:
    """GRPO, GRPO + TIS, GSPO, GRPO + R3 and GSPO + R3 under an engine that disagrees strongly.

    One run folder a cell; finished cells are skipped. Writes results.md, results.json and
    curves.png after every cell. About 30 minutes on one free core.
    """
    from agent_rl.study.cells import ENGINES, Setting
    from agent_rl.study.collapse import outcomes, run_study
    from agent_rl.study.report import markdown, plot, to_json

    if engine not in ENGINES:
        raise typer.BadParameter(
            f"got {engine!r}, expected one of {', '.join(ENGINES)}", param_hint="--engine"
        )
    console = Console()
    setting = Setting(num_seeds=seeds, steps=steps, engine_dtype=ENGINES[engine])

    def write(so_far: Sequence[Outcome]) -> None:
        write_aside(folder / "results.md", markdown(so_far).encode())
        flat = orjson.dumps(to_json(so_far), option=orjson.OPT_INDENT_2)
        write_aside(folder / "results.json", flat + b"\n")
        plot(so_far, setting, folder / "curves.png")

    if show:
        finished = outcomes(folder, setting)
    else:
        finished = run_study(
            folder, setting, report=lambda text: console.print(text, soft_wrap=True), done=write
        )
    write(finished)
    console.print(markdown(finished), soft_wrap=True)
    console.print(f"results: {folder / 'results.md'}, {folder / 'curves.png'}", soft_wrap=True)
