"""The commands: what a person sees, and which errors reach them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer import Typer
from typer.testing import CliRunner

from agent_rl.config.reading import load_config
from agent_rl.errors import ConfigError
from envs.errors import TaskError
from envs.tasks.from_repository import MakeReport
from envs.tasks.from_repository.store import load_made_tasks
from eval.cli import ConsoleObserver, eval_app
from eval.outcomes import Outcome
from eval.report import Report, Result
from eval.show import print_report, write_pages
from eval.tasks_cli import show_made, show_next, tasks_app, train_command


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


def test_made_tasks_end_with_the_commands_up_to_training() -> None:
    out = Path("tasks/toolz")
    console, stream = text_console()
    show_next(out, 20, "python-tasks:latest", console)
    shown = stream.getvalue()
    for line in (
        "Docker",
        "docker build --tag python-tasks:latest tasks/toolz/base\n",
        "sh tasks/toolz/images/build.sh\n",
        "agent-rl swebench grade gold --dataset tasks/toolz/swebench.jsonl --name check\n",
        f"{train_command(out)}\n",
    ):
        assert line in shown
    console, stream = text_console()
    show_next(out, 20, None, console)  # the images are there already
    assert "docker build" not in stream.getvalue()
    console, stream = text_console()
    show_next(out, 0, "python-tasks:latest", console)
    assert "agent-rl train" not in stream.getvalue()


def test_the_train_command_is_a_valid_configuration() -> None:
    _, _, config, *overrides = train_command(Path("tasks/toolz")).split()
    path = Path(__file__).parents[2] / config
    loaded = load_config(path, overrides, on_this_machine=False)
    assert (loaded.tasks.rows, loaded.sandbox.kind) == ("tasks/toolz/r2e_gym.jsonl", "docker")


@pytest.mark.slow
def test_a_folder_alone_becomes_tasks_in_a_folder_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "pyproject.toml": '[project]\nname = "doubling"\nversion = "3.1"\n',
        "doubling.py": "def double(x):\n    return x + x\n",
        "test_doubling.py": (
            "from doubling import double\n\n\ndef test_two():\n    assert double(2) == 4\n\n\n"
            "def test_three():\n    assert double(3) == 6\n"
        ),
    }
    (tmp_path / "doubling").mkdir()
    for name, text in files.items():
        (tmp_path / "doubling" / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(tasks_app, ["make", "doubling", "--max-tasks", "1"])
    assert result.exception is None, result.output
    assert "doubling 3.1: 2 tests" in result.output
    assert train_command(Path("tasks/doubling")) in result.output
    (task,) = load_made_tasks(Path("tasks/doubling"))
    assert task.issue.startswith("doubling 3.1: ")


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
