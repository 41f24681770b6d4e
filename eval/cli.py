"""``agent-rl swebench run | grade | report``: thin commands over ``eval.suite``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from agent_rl.commands.terminal import make_console
from agent_rl.doctor.check import Check
from eval.config import SuiteConfig, load_suite
from eval.show import print_report
from eval.suite import Finished, grade_elsewhere, report_only, run_suite, write_gold

eval_app = typer.Typer(
    name="swebench",
    help="Evaluate agents on SWE-bench with the official harness.",
    no_args_is_help=True,
)
ConfigPath = Annotated[
    Path, typer.Argument(help="YAML, for example configs/eval/swebench_verified.yaml")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="section.key=value, for example samples=4")
]


class ConsoleObserver:
    """Prints a line for each stage and each step of progress that changed something."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = ""

    def stage(self, name: str) -> None:
        self._console.print(name, style="bold", highlight=False, markup=False, soft_wrap=True)

    def progress(self, what: str, done: int, total: int) -> None:
        line = f"  [{done}/{total}] {what}"
        if line != self._last:
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
            self._last = line


@eval_app.command()
def run(config: ConfigPath, overrides: Overrides = None) -> None:
    """Generate, grade and report; the same command resumes a run that was stopped."""
    _show(
        run_suite(load_suite(config, overrides or []), ConsoleObserver(make_console(stderr=True)))
    )


@eval_app.command()
def grade(
    predictions: Annotated[
        list[Path], typer.Argument(help=".jsonl or .json, one file per sample; or the word gold")
    ],
    dataset: Annotated[str, typer.Option(help="file, folder, verified, lite or full")],
    name: Annotated[str, typer.Option(help="of the run; its folder is <root>/<name>")],
    root: Annotated[str, typer.Option(help="where runs lie")] = "runs/eval",
    split: str = "test",
    workers: int = 4,
    timeout: Annotated[int, typer.Option(help="seconds for one instance's tests")] = 1800,
    python: Annotated[str, typer.Option(help="interpreter with another swebench")] = "",
    redo_timeouts: bool = False,
) -> None:
    """Grade predictions that were made elsewhere; ``gold`` checks the set-up."""
    settings = {
        "dataset": {"source": dataset, "split": split},
        "grading": {
            "num_workers": workers,
            "timeout_s": timeout,
            "python": python,
            "redo_timeouts": redo_timeouts,
        },
    }
    config = grading_config(name, root, len(predictions), settings)
    files = list(predictions)
    if files == [Path("gold")]:
        files = [write_gold(config, Path(root) / name / "gold.jsonl")]
    _show(grade_elsewhere(config, files, ConsoleObserver(make_console(stderr=True))))


def doctor(config: Path, overrides: Sequence[str]) -> list[Check]:
    """Check what a configuration needs of this machine, for ``agent-rl doctor``.

    Raises ConfigError for a configuration that no machine could run.
    """
    from eval.doctor import check_needs

    return list(check_needs(load_suite(config, overrides)))


@eval_app.command()
def report(config: ConfigPath, overrides: Overrides = None) -> None:
    """Write the report of a run as far as it got, without starting anything."""
    _show(report_only(load_suite(config, overrides or [])))


def grading_config(
    name: str, root: str, samples: int, settings: dict[str, dict[str, str | int | bool]]
) -> SuiteConfig:
    """Make a suite for grading alone. Raises ConfigError."""
    from eval.config import DatasetConfig, GradingConfig

    return SuiteConfig(
        name=name,
        run_root=root,
        samples=samples,
        dataset=DatasetConfig(**settings["dataset"]),  # pyright: ignore[reportArgumentType]
        grading=GradingConfig(**settings["grading"]),  # pyright: ignore[reportArgumentType]
    )


def _show(finished: Finished) -> None:
    console = make_console()
    print_report(finished.report, console)
    console.print(f"report  {finished.folder / 'report.json'}", highlight=False, soft_wrap=True)
    console.print(f"pages   {finished.page}", highlight=False, soft_wrap=True)
