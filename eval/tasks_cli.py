"""``agent-rl tasks make``: validated tasks from a repository of one's own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from envs.images.environments import ImageSettings
from envs.tasks.from_repository import (
    ImageReport,
    MakeOptions,
    MakeReport,
    check_images,
    make_tasks,
)

tasks_app = typer.Typer(
    name="tasks", help="Make tasks to train and evaluate on.", no_args_is_help=True
)


@tasks_app.callback()
def _group() -> None:
    """Keeps ``make`` a command of its own while it is the only one."""


@tasks_app.command(
    epilog="Example: agent-rl tasks make toolz-1.0.0.tar.gz tasks/toolz --max-tasks 100"
)
def make(
    source: Annotated[Path, typer.Argument(help="a folder or an sdist (.tar.gz, .zip)")],
    out: Annotated[Path, typer.Argument(help="a folder for rows and image contexts")],
    max_tasks: Annotated[int, typer.Option(help="stop when so many are kept")] = 50,
    max_tried: Annotated[int, typer.Option(help="stop when so many bugs were tried")] = 500,
    max_per_function: Annotated[int, typer.Option(help="bugs tried in one function")] = 6,
    seed: Annotated[int, typer.Option(help="the same seed gives the same tasks")] = 0,
    kind: Annotated[list[str] | None, typer.Option(help="of bug; all when left out")] = None,
    timeout: Annotated[float, typer.Option(help="seconds of one test run")] = 300.0,
    cpu: Annotated[int, typer.Option(help="CPU seconds of one test run")] = 60,
    workers: Annotated[int, typer.Option(help="test runs at a time")] = 2,
    base_image: Annotated[
        str, typer.Option(help="images start from it: git, python3, requirements.txt")
    ] = "python-tasks:latest",
    images: Annotated[
        bool, typer.Option("--images", help="also build the images and validate inside them")
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
    errors = Console(stderr=True)
    is_live = sys.stderr.isatty()

    def progress(tried: int, kept: int, wanted: int) -> None:
        line = f"tried {tried}, kept {kept} of {wanted}"
        errors.print(line, end="\r" if is_live else "\n", highlight=False)

    show_made(make_tasks(source, out, options, progress), out, Console())
    if images:
        show_images(_check_images(out, docker_url, workers), Console())


def _check_images(out: Path, docker_url: str, workers: int) -> ImageReport:
    from envs.sandbox.docker.docker_py import DockerPyEngine

    settings = ImageSettings("tasks-make", out / "validations")
    engine = DockerPyEngine(docker_url or None)
    return check_images(out, engine, settings, docker_url=docker_url, num_workers=workers)


def show_images(report: ImageReport, console: Console) -> None:
    """What held inside the images."""
    console.print(f"in their images: {len(report.kept)} kept, {len(report.refused)} refused")
    for image, reason in report.refused.items():
        console.print(f"refused: {image}: {reason}", highlight=False, soft_wrap=True)


def show_made(report: MakeReport, out: Path, console: Console) -> None:
    """What became of every bug: kept and refused add up to tried."""
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
    console.print(
        f"the base image needs {out / 'requirements.txt'}; check it with: agent-rl swebench grade"
        f" gold --dataset {out / 'swebench.jsonl'} --name check",
        highlight=False,
        soft_wrap=True,
    )
