"""``agent-rl study``: experiments of many runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer

from agent_rl.commands.terminal import make_console
from agent_rl.store.run_folder import write_aside

if TYPE_CHECKING:
    from agent_rl.study.outcome import Outcome

study_app = typer.Typer(help="Experiments of many runs, resumable.", no_args_is_help=True)


@study_app.callback()
def study() -> None:
    """Experiments of many runs, resumable."""


@study_app.command(
    epilog="Example: agent-rl study collapse runs/collapse (again to continue, --show for what has "
    "finished). A harsher one where routing alone differs: agent-rl study collapse "
    "runs/collapse_router --engine router_int4_simulated --lr 2e-3 --steps 80 --mini-steps 1"
)
def collapse(
    folder: Annotated[Path, typer.Argument(help="where the runs and the results go")] = Path(
        "runs/collapse"
    ),
    engine: Annotated[
        str,
        typer.Option(help="bfloat16, fp8_simulated, int4_simulated or router_int4_simulated"),
    ] = "int4_simulated",
    steps: Annotated[int, typer.Option(help="training steps of every run", min=1)] = 25,
    lr: Annotated[float, typer.Option(help="learning rate")] = 7e-4,
    num_eval: Annotated[int, typer.Option(help="held-out tasks before and after", min=1)] = 128,
    seeds: Annotated[int, typer.Option(help="seeds of every method", min=1)] = 3,
    mini_steps: Annotated[
        list[int] | None,
        typer.Option(help="optimizer steps from one rollout, may repeat (default: 1, 4)", min=1),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(help="grpo, grpo_tis, gspo, grpo_r3, gspo_r3, may repeat (default: all)"),
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="run nothing, sum up")] = False,
) -> None:
    """GRPO, GRPO + TIS, GSPO, GRPO + R3 and GSPO + R3 under an engine that disagrees strongly.

    One run folder a cell; finished cells are skipped. Writes results.md, results.json and
    curves.png after every cell. Seeds, methods and mini-steps may be added to a folder; any other
    option needs another folder. About a minute a cell of 25 steps on one free core, so 30 minutes
    as it is, and 4 minutes a cell of 80 steps.
    """
    from agent_rl.study.cells import ENGINES, METHODS, Matrix, Setting
    from agent_rl.study.collapse import outcomes, run_study
    from agent_rl.study.report import markdown, plot, to_json

    _check_names("--engine", [engine], ENGINES)
    _check_names("--methods", methods or [], METHODS)
    console = make_console()
    setting = Setting(engine_dtype=ENGINES[engine], steps=steps, lr=lr, num_eval=num_eval)
    default = Matrix()
    matrix = Matrix(
        methods=tuple(methods or default.methods),
        mini_steps=tuple(mini_steps or default.mini_steps),
        seeds=tuple(range(seeds)),
    )

    def write(so_far: Sequence[Outcome]) -> None:
        write_aside(folder / "results.md", markdown(so_far).encode())
        flat = orjson.dumps(to_json(so_far, setting), option=orjson.OPT_INDENT_2)
        write_aside(folder / "results.json", flat + b"\n")
        plot(so_far, setting, folder / "curves.png")

    if show:
        finished = outcomes(folder, matrix)
    else:
        finished = run_study(
            folder,
            setting,
            matrix,
            report=lambda text: console.print(text, soft_wrap=True),
            done=write,
        )
    write(finished)
    console.print(markdown(finished), soft_wrap=True)
    console.print(f"results: {folder / 'results.md'}, {folder / 'curves.png'}", soft_wrap=True)


def _check_names(option: str, names: Sequence[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise typer.BadParameter(
                f"got {name!r}, expected one of {', '.join(known)}", param_hint=option
            )
