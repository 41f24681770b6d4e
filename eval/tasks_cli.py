"""``agent-rl tasks make``: validated tasks from a repository of one's own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from agent_rl.commands.terminal import make_console
from agent_rl.config.suggestions import command_line
from envs.images.environments import ImageSettings
from envs.tasks.from_repository import (
    ImageReport,
    MakeOptions,
    MakeReport,
    check_images,
    make_tasks,
    read_repository,
)

TRAIN_CONFIG = "configs/train/swe_qwen3_30b_a3b.yaml"

tasks_app = typer.Typer(
    name="tasks", help="Make tasks to train and evaluate on.", no_args_is_help=True
)


@tasks_app.callback()
def _group() -> None:
    """Keep ``make`` a command of its own while it is the only one."""


@tasks_app.command(
    epilog="Example: agent-rl tasks make toolz-1.0.0.tar.gz tasks/toolz --max-tasks 100"
)
def make(
    source: Annotated[Path, typer.Argument(help="a folder or an sdist (.tar.gz, .zip)")],
    out: Annotated[
        Path | None,
        typer.Argument(help="a folder for rows and image contexts; default: tasks/NAME"),
    ] = None,
    max_tasks: Annotated[int, typer.Option(help="stop when so many are kept")] = 50,
    max_tried: Annotated[int, typer.Option(help="stop when so many bugs were tried")] = 500,
    max_per_function: Annotated[int, typer.Option(help="bugs tried in one function")] = 6,
    seed: Annotated[int, typer.Option(help="the same seed gives the same tasks")] = 0,
    kind: Annotated[list[str] | None, typer.Option(help="of bug; all when left out")] = None,
    timeout: Annotated[float, typer.Option(help="seconds of one test run")] = 300.0,
    cpu: Annotated[int, typer.Option(help="CPU seconds of one test run")] = 60,
    workers: Annotated[int, typer.Option(help="test runs at a time")] = 2,
    base_image: Annotated[
        str, typer.Option(help="images start from it; OUT/base has a recipe for one")
    ] = "python-tasks:latest",
    images: Annotated[
        bool,
        typer.Option(
            "--images", help="also build them, the base aside, and validate inside (Docker)"
        ),
    ] = False,
    docker_url: Annotated[
        str, typer.Option(help="the daemon's socket; DOCKER_HOST when left out")
    ] = "",
) -> None:
    """Inject bugs, keep those that the repository's own tests notice, write the rows."""
    options = MakeOptions(
        max_tasks=max_tasks,
        max_tried=max_tried,
        max_per_function=max_per_function,
        seed=seed,
        kinds=tuple(kind or ()),
        timeout_s=timeout,
        cpu_s=cpu,
        num_workers=workers,
        base_image=base_image,
    )
    out = out or Path("tasks", read_repository(source).name)
    errors = make_console(stderr=True)
    is_live = sys.stderr.isatty()

    def progress(tried: int, kept: int, wanted: int) -> None:
        line = f"tried {tried}, kept {kept} of {wanted}"
        errors.print(line, end="\r" if is_live else "\n", highlight=False)

    console = make_console()
    report = make_tasks(source, out, options, progress)
    show_made(report, out, console)
    num_kept = report.kept
    if images and num_kept:
        checked = _check_images(out, docker_url, workers)
        show_images(checked, console)
        num_kept = len(checked.kept)
    show_next(out, num_kept, None if images else base_image, console)


def _check_images(out: Path, docker_url: str, workers: int) -> ImageReport:
    from envs.sandbox.docker.docker_py import DockerPyEngine

    settings = ImageSettings("tasks-make", out / "validations")
    engine = DockerPyEngine(docker_url or None)
    return check_images(out, engine, settings, docker_url=docker_url, num_workers=workers)


def show_images(report: ImageReport, console: Console) -> None:
    """Print the tasks that held inside their images."""
    console.print(f"in their images: {len(report.kept)} kept, {len(report.refused)} refused")
    for image, reason in report.refused.items():
        console.print(f"refused: {image}: {reason}", highlight=False, soft_wrap=True)


def show_made(report: MakeReport, out: Path, console: Console) -> None:
    """Print what became of every bug: kept and refused add up to tried."""
    console.print(f"{report.repository}: {report.num_tests} tests, {report.seconds:,.0f} s")
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("bugs")
    table.add_column("count", justify="right")
    table.add_row("kept", str(report.kept))
    for reason, count in report.refused.items():
        table.add_row(f"refused: {reason.replace('_', ' ')}", str(count))
    table.add_section()
    table.add_row("tried", str(report.tried))
    console.print(table)
    for path, reason in report.test_files_left_out.items():
        console.print(f"not used: {path}: {reason}", highlight=False, soft_wrap=True)
    console.print(f"rows and image contexts in {out}", highlight=False, soft_wrap=True)


def show_next(out: Path, num_kept: int, base_image: str | None, console: Console) -> None:
    """Print the commands up to training. ``base_image`` None: the images are built already."""
    if not num_kept:
        console.print("no task was kept, so there is nothing to train on")
        return
    grade = ("agent-rl", "swebench", "grade", "gold")
    lines = ["", "Next (each task is a container image, so a Docker daemon is needed):"]
    if base_image is not None:
        lines += [
            "  a base image with git, Python and requirements.txt, unless you have one (network):",
            f"    {command_line('docker', 'build', '--tag', base_image, out / 'base')}",
            "  the tasks' images (--images does this, and leaves out what fails in its image):",
            f"    {command_line('sh', out / 'images' / 'build.sh')}",
        ]
    lines += [
        "  check that the official harness resolves every fix:",
        f"    {command_line(*grade, '--dataset', out / 'swebench.jsonl', '--name', 'check')}",
        "  train, with your own model, engine and sizes in place of the file's:",
        f"    {train_command(out)}",
    ]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def train_command(out: Path) -> str:
    """Return the command that trains on a made folder, with every key that its tasks need."""
    keys = ("tasks.kind=r2e_gym", f"tasks.rows={out / 'r2e_gym.jsonl'}")
    more = ("tasks.heldout_fraction=0.2", "sandbox.kind=docker", "agent.renderer=chat_template")
    return command_line("agent-rl", "train", TRAIN_CONFIG, *keys, *more)
