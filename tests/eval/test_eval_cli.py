"""The commands: what a person sees, and which errors reach them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer import Typer
from typer.testing import CliRunner

from agent_rl.errors import ConfigError
from envs.errors import TaskError
from envs.tasks.from_repository import MakeReport
from eval.cli import ConsoleObserver, eval_app
from eval.outcomes import Outcome
from eval.report import Report, Result
from eval.show import print_report, write_pages
from eval.tasks_cli import show_made, tasks_app


def text_console() -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, width=100), stream


def test_the_report_on_a_terminal_adds_up() -> None:
    results = tuple(
        Result(f"i{n}", "org/repo", 0, outcome, turns=2, stop_reason="submit")
        for n, outcome in enumerate(Outcome)
    )
    console, stream = text_console()
    print_report(Report("run", "m", "d", "h", 7, 1, results), console)
    shown = stream.getvalue()
    for outcome in Outcome:
        assert outcome.label in shown
    assert "asked for" in shown
    assert "14.3%  (95 % interval 2.6% to 51.3%)" in shown
    assert "org/repo" in shown


def test_pages_of_predictions_made_elsewhere(tmp_path: Path) -> None:
    result = Result("i0", "r", 0, Outcome.NOT_RUN)
    report = Report("run", "m", "d", "", 1, 1, (result,))
    index = write_pages(tmp_path, report, [(result, None, None)])
    assert 'href="i0.0.html"' in index.read_text()
    assert "not played" in (tmp_path / "i0.0.html").read_text()


def test_progress_is_a_line_for_every_change() -> None:
    console, stream = text_console()
    observer = ConsoleObserver(console)
    observer.stage("grading [x]")
    for done in (0, 0, 1):
        observer.progress("graded", done, 2)
    assert stream.getvalue().splitlines() == ["grading [x]", "  [0/2] graded", "  [1/2] graded"]


def test_made_tasks_add_up() -> None:
    console, stream = text_console()
    report = MakeReport(
        "toolz 1",
        180,
        42,
        20,
        {"no_test_fails": 21, "hangs": 1},
        {},
        {"t.py": "two runs differ"},
        5,
    )
    show_made(report, Path("out"), console)
    shown = stream.getvalue()
    for line in (
        "kept",
        "refused: no test fails",
        "refused: hangs",
        "tried",
        "t.py: two runs differ",
    ):
        assert line in shown


def test_errors_reach_the_one_that_prints_them(tmp_path: Path) -> None:
    runner = CliRunner()
    result = runner.invoke(eval_app, ["run", str(tmp_path / "none.yaml")])
    assert isinstance(result.exception, ConfigError)
    result = runner.invoke(tasks_app, ["make", str(tmp_path / "none.tar.gz"), str(tmp_path / "o")])
    assert isinstance(result.exception, TaskError)
    result = runner.invoke(
        eval_app, ["grade", "gold", "--dataset", str(tmp_path / "x.jsonl"), "--name", "n"]
    )
    assert isinstance(result.exception, TaskError)


@pytest.mark.parametrize("app", [eval_app, tasks_app])
def test_help_needs_nothing(app: Typer) -> None:
    assert CliRunner().invoke(app, ["--help"]).exit_code == 0
