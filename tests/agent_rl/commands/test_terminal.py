"""What commands print is data: brackets and colons in it are shown as they are."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from agent_rl.cli import EXIT_FAILED, EXIT_INFRASTRUCTURE, EXIT_USAGE, _errors_as_exit_codes
from agent_rl.commands.doctor import _table
from agent_rl.commands.terminal import make_console
from agent_rl.doctor.check import Check
from agent_rl.errors import AgentRLError, CheckpointError, ConfigError, RolloutError
from agent_rl.metrics.display import Display, LineDisplay, LiveDisplay
from agent_rl.metrics.summary import Evaluation, evaluation_table

PACKAGE = Path(__file__).parents[3] / "agent_rl"
EVALUATION = PACKAGE.parent / "eval"
NASTY = "'agent-rl[cluster]' in runs/a[red]b [/x] :bug: [bold"


def shown(printable: str | Table | Panel) -> str:
    console = make_console(width=200)
    console.file = io.StringIO()
    console.print(printable)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError([NASTY, "second"]), EXIT_USAGE),
        (RolloutError(NASTY), EXIT_INFRASTRUCTURE),
        (CheckpointError(NASTY), EXIT_FAILED),
    ],
)
def test_an_error_is_printed_as_it_is(error: AgentRLError, code: int) -> None:
    console = make_console()
    console.file = io.StringIO()
    with pytest.raises(SystemExit) as ended, _errors_as_exit_codes(console):
        raise error
    assert ended.value.code == code
    assert console.file.getvalue().splitlines()[0] == f"error: {NASTY}"


def test_every_cell_of_the_doctors_table_is_printed_as_it_is() -> None:
    text = shown(_table(NASTY, [Check(NASTY, "missing", f"detail {NASTY}", f"do {NASTY}")]))
    assert text.count(NASTY) == 4
    assert "missing" in text


def test_the_table_of_an_evaluation_is_printed_as_it_is() -> None:
    result = Evaluation(0.5, 2, 0, {NASTY: (1, 2)}, 3.0)
    assert shown(evaluation_table(NASTY, {NASTY: result})).count(NASTY) == 3


def test_an_issue_in_its_panel_is_printed_as_it_is() -> None:
    """As ``agent-rl rollout`` shows it; a panel reads its own title as markup, so that is Text."""
    assert shown(Panel(NASTY, title=Text(NASTY))).count(NASTY) == 2


@pytest.mark.parametrize("kind", [LineDisplay, LiveDisplay])
def test_notes_and_activities_of_a_run_are_printed_as_they_are(
    kind: type[LineDisplay | LiveDisplay],
) -> None:
    console = make_console(width=200)
    console.file = io.StringIO()
    display: Display = kind(console)
    with display:
        display.activity("[/x] [red]", 1, 2)
        display.note(NASTY)
    text = console.file.getvalue()
    assert NASTY in text
    assert kind is LineDisplay or "[/x] [red]" in text


def test_no_command_makes_a_console_that_reads_markup() -> None:
    pattern = re.compile(r"(?<!\w)Console\(")
    files = [file for folder in (PACKAGE, EVALUATION) for file in folder.rglob("*.py")]
    found = [file.name for file in files if pattern.search(file.read_text())]
    assert found == ["terminal.py"]
