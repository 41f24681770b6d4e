"""The ``agent-rl`` command. Heavy imports happen inside the commands, so ``--help`` is quick."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from agent_rl.commands.terminal import make_console
from agent_rl.config.suggestions import command_line
from agent_rl.errors import AgentRLError, ConfigError, RolloutError
from agent_rl.run.interrupt import Interrupted

if TYPE_CHECKING:
    from agent_rl.commands.doctor import CheckNeeds

EXIT_FAILED, EXIT_USAGE, EXIT_INFRASTRUCTURE, EXIT_INTERRUPTED = 1, 2, 3, 130

app = typer.Typer(
    name="agent-rl",
    help=(
        "Train multi-turn agents on Mixture-of-Experts models with Rollout Routing Replay.\n\n"
        "Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 3 too much of the "
        "infrastructure failed, 130 interrupted (resume with --resume)."
    ),
    epilog=(
        "Example: agent-rl train configs/repair_tiny.yaml train.steps=50 && agent-rl eval "
        "runs/repair_tiny"
    ),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

ConfigPath = Annotated[Path, typer.Argument(help="YAML configuration, for example one in configs/")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="section.key=value, for example train.steps=50")
]


@app.command(
    epilog="Examples: agent-rl train configs/repair_tiny.yaml seed=1 name=second · "
    "agent-rl train --resume runs/second"
)
def train(
    config: Annotated[Path | None, typer.Argument(help="YAML configuration")] = None,
    overrides: Overrides = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="continue the run in this folder; may change trainer.* (not dtype), "
            "train.steps, train.save_every, train.keep_last and train.max_wall_s"
        ),
    ] = None,
    other_tasks: Annotated[
        bool,
        typer.Option("--other-tasks", help="with --resume: go on although the tasks have changed"),
    ] = False,
) -> None:
    """Train a policy and evaluate it on held-out tasks before and after."""
    from agent_rl.commands.train import train_command

    _refuse_evaluations("train", config)
    train_command(config, overrides or [], resume, other_tasks=other_tasks)


@app.command(
    name="eval",
    epilog="Examples: agent-rl eval runs/repair_tiny · agent-rl eval configs/repair_tiny.yaml "
    "tasks.heldout_split=confirm · agent-rl eval runs/repair_tiny --step 90 · "
    "agent-rl eval configs/eval/swebench_verified.yaml dataset.max_instances=10",
)
def evaluate(
    source: Annotated[Path, typer.Argument(help="a run folder, or a YAML configuration")],
    overrides: Overrides = None,
    step: Annotated[int | None, typer.Option(help="checkpoint of a run; default: newest")] = None,
    json: Annotated[Path | None, typer.Option(help="also write the result here")] = None,
) -> None:
    """Measure a checkpoint on held-out tasks, or run a benchmark such as SWE-bench."""
    from agent_rl.commands.evaluate import evaluate_command

    if (point := _evaluation_of(source)) is not None:
        if step is not None or json is not None:
            raise ConfigError([f"{source}: --step and --json are for run folders only"])
        point.load()(source, overrides)
        return
    evaluate_command(source, overrides or [], step, json)


@app.command(
    epilog="Examples: agent-rl rollout configs/repair_tiny.yaml --task 3 · agent-rl rollout "
    "runs/repair_tiny --task 3"
)
def rollout(
    source: Annotated[Path, typer.Argument(help="a run folder, or a YAML configuration")],
    overrides: Overrides = None,
    task: Annotated[int, typer.Option(help="number of the held-out task, from 0")] = 0,
    seed: Annotated[int, typer.Option(help="seed of the sampling")] = 0,
    export: Annotated[
        Path | None, typer.Option(help="also write the task here, as a git repository")
    ] = None,
) -> None:
    """Play one episode and show it: issue, turns, tool output, patch, reward, routing."""
    from agent_rl.commands.rollout import rollout_command

    _refuse_evaluations("rollout", source)
    rollout_command(source, overrides or [], task, seed, export)


@app.command(
    epilog="Examples: agent-rl doctor · agent-rl doctor configs/repair_tiny.yaml · "
    "agent-rl doctor configs/eval/swebench_verified.yaml · agent-rl doctor --gpu"
)
def doctor(
    config: Annotated[Path | None, typer.Argument(help="also check what this needs")] = None,
    overrides: Overrides = None,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="check the trainer on this machine's GPU, in 3 minutes")
    ] = False,
) -> None:
    """Say what works on this machine and what a configuration lacks."""
    from agent_rl.commands.doctor import doctor_command, gpu_doctor_command

    if gpu and config is not None:
        raise ConfigError([f"doctor --gpu: got {config}, expected no configuration: one at a time"])
    if gpu:
        gpu_doctor_command()
    else:
        doctor_command(config, overrides or [], _doctor_of(config))


@app.command(
    epilog="Examples: agent-rl export runs/repair_tiny policies/mine · "
    "agent-rl export runs/repair_tiny policies/mine --step 90 --dtype bfloat16"
)
def export(
    source: Annotated[Path, typer.Argument(help="a run folder, or one of its checkpoints")],
    folder: Annotated[Path, typer.Argument(help="where the model is written (a new folder)")],
    step: Annotated[int | None, typer.Option(help="checkpoint of a run; default: newest")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16; default: as trained")
    ] = None,
) -> None:
    """Write a checkpoint's model as a folder that transformers, SGLang and vLLM load."""
    from agent_rl.commands.export import export_command

    export_command(source, folder, step, dtype)


@app.command(epilog="Example: agent-rl warmstart policies/mine --seed 1")
def warmstart(
    folder: Annotated[Path, typer.Argument(help="where the policy is written (a new folder)")],
    recipe: Annotated[
        str, typer.Option(help="tiny_moe, or bench_moe32, bench_moe8, bench_dense of bench r3")
    ] = "tiny_moe",
    seed: Annotated[int | None, typer.Option(help="of demonstrations and weights")] = None,
    num_demos: Annotated[
        int | None, typer.Option(help="demonstrations in each of two stages")
    ] = None,
) -> None:
    """Make a shipped starting policy again: scripted noisy demonstrations, imitated."""
    from agent_rl.commands.warmstart import warmstart_command

    warmstart_command(folder, recipe, seed, num_demos)


@app.command(epilog="Examples: agent-rl config · agent-rl config routing")
def config(
    prefix: Annotated[str | None, typer.Argument(help="a section or a key; default: all")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="as docs/configuration.md")] = False,
) -> None:
    """List the keys of a configuration: type, default and meaning."""
    from agent_rl.commands.config import config_command

    config_command(prefix, markdown)


@app.command(
    epilog="Examples: agent-rl show runs/repair_tiny · agent-rl show runs/repair_tiny --step 100"
)
def show(
    run: Annotated[Path, typer.Argument(help="a run folder")],
    out: Annotated[Path | None, typer.Option(help="folder to write to; default: RUN/pages")] = None,
    step: Annotated[list[int] | None, typer.Option(help="may repeat; default: the newest")] = None,
) -> None:
    """Write pages that show the episodes of a training run, to read in a browser."""
    from agent_rl.commands.show import show_command

    show_command(run, out, step or [])


def _evaluation_of(source: Path) -> EntryPoint | None:
    """Return the command for ``source`` if it is a benchmark's configuration; None for our own.

    A file with a section that only training has is ours, with a key too many.
    """
    from agent_rl.config.reading import top_level_keys

    sections = set(top_level_keys(source)) if source.is_file() else set[str]()
    if sections & {"policy", "tasks", "train", "trainer"}:
        return None
    points = entry_points(group="agent_rl.evaluations")
    return next((point for point in points if point.name in sections), None)


def _doctor_of(source: Path | None) -> CheckNeeds | None:
    """Return what checks ``source`` if it is an evaluation's: the ``doctor`` beside its command."""
    if source is None or (point := _evaluation_of(source)) is None:
        return None
    return import_module(point.module).doctor


def _refuse_evaluations(command: str, source: Path | None) -> None:
    if source is not None and (point := _evaluation_of(source)) is not None:
        raise ConfigError(
            [
                f"{source}: got the configuration of an evaluation (it has the section "
                f"{point.name}), expected one of a training run: {command} cannot use it; run it "
                f"with: {command_line('agent-rl', 'eval', source)}"
            ]
        )


@contextmanager
def _errors_as_exit_codes(console: Console) -> Iterator[None]:
    """Expected failures become a message and an exit code; anything else keeps its traceback."""
    from envs.errors import EnvsError
    from routing_cache import RoutingCacheError

    try:
        yield
    except Interrupted:
        console.print("interrupted; completed steps are saved", style="yellow")
        sys.exit(EXIT_INTERRUPTED)
    except ConfigError as error:
        for problem in error.problems:
            console.print(f"error: {problem}", style="red", soft_wrap=True, highlight=False)
        sys.exit(EXIT_USAGE)
    except RolloutError as error:
        console.print(f"error: {error}", style="red", soft_wrap=True, highlight=False)
        sys.exit(EXIT_INFRASTRUCTURE)
    except (AgentRLError, EnvsError, RoutingCacheError) as error:
        console.print(f"error: {error}", style="red", soft_wrap=True, highlight=False)
        sys.exit(EXIT_FAILED)


def _add_groups() -> None:
    """Commands with commands of their own; packages above this one come as entry points."""
    from agent_rl.commands.bench import bench_app
    from agent_rl.commands.study import study_app

    app.add_typer(bench_app, name="bench")
    app.add_typer(study_app, name="study")
    for point in entry_points(group="agent_rl.commands"):
        app.add_typer(point.load(), name=point.name)


def main() -> None:
    """Entry point of the ``agent-rl`` command."""
    _add_groups()
    with _errors_as_exit_codes(make_console(stderr=True)):
        app()
