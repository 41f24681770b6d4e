"""Commands in messages can be copied into a shell, also where a path has blanks and quotes."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from agent_rl.commands.train import _disk_full_as_error, _resumed
from agent_rl.config.reading import load_config
from agent_rl.config.schema import RunConfig
from agent_rl.config.suggestions import command_line
from agent_rl.errors import AgentRLError, ConfigError
from agent_rl.store.run_folder import RunFolder
from eval.tasks_cli import train_command

REPOSITORY = Path(__file__).parents[3]
PROGRAMS = re.compile(r"(?<![\w.])(agent-rl|hf download|docker build|sh) [^\n;:]*\Z")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder whose name a shell would take apart."""
    folder = RunFolder.create(RunConfig(name="r", run_root=str(tmp_path / "it's $HOME; two")))
    folder.close()
    return folder.path


def shell_words(error: AgentRLError, pattern: str) -> list[str]:
    """The words that a shell makes of the command that ``pattern`` finds."""
    found = re.search(pattern, str(error), re.DOTALL)
    assert found is not None, error
    return shlex.split(found[1])


def test_words_that_need_no_quotes_get_none() -> None:
    line = command_line("agent-rl", "eval", Path("runs/a"), "--step", 3, "policy.path=x/y", "k=V")
    assert line == "agent-rl eval runs/a --step 3 policy.path=x/y k=V"


def test_a_name_that_is_taken(run: Path) -> None:
    with pytest.raises(AgentRLError) as taken:
        RunFolder.create(RunConfig(name="r", run_root=str(run.parent)))
    words = shell_words(taken.value, r"resume it with (.*); or give")
    assert words == ["agent-rl", "train", "--resume", str(run)]


def test_a_run_folder_given_as_a_configuration(run: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(run)
    resume = shell_words(refused.value, r"to go on with the run: (.*); to start")
    assert resume == ["agent-rl", "train", "--resume", str(run)]
    again = shell_words(refused.value, r"another like it: (.*)$")
    assert again == ["agent-rl", "train", str(run / "config.yaml")]


def test_a_key_that_a_resumed_run_cannot_change(run: Path) -> None:
    newest = run / "checkpoints" / "step-00000010"
    newest.mkdir(parents=True)
    with pytest.raises(ConfigError) as refused:
        _resumed(run, ["optim.lr=1e-5"])
    words = shell_words(refused.value, r"starts afresh\): (.*)$")
    config = str(run / "config.yaml")
    assert words == ["agent-rl", "train", config, f"policy.path={newest}", "optim.lr=VALUE"]


def test_a_full_disk(run: Path) -> None:
    with pytest.raises(AgentRLError) as full, _disk_full_as_error(run):
        raise OSError(28, "No space left on device")
    words = shell_words(full.value, r"continue with: (.*)$")
    assert words == ["agent-rl", "train", "--resume", str(run)]


def test_tasks_to_train_on(tmp_path: Path) -> None:
    where = tmp_path / "my models"
    rows = f"tasks.rows={where / 'r2e_gym.jsonl'}"
    assert rows in shlex.split(train_command(where))


def raw_commands(source: str) -> Iterator[str]:
    """The texts in ``source`` that put a value into a command by hand."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.JoinedStr):
            continue
        for before, value in pairwise(node.values):
            if isinstance(before, ast.Constant) and isinstance(value, ast.FormattedValue):
                text = str(before.value)
                if PROGRAMS.search(text):
                    yield f"line {node.lineno}: {text}"


def test_no_message_puts_a_value_into_a_command_by_hand() -> None:
    assert list(raw_commands('f"go on: agent-rl train --resume {run}"'))
    assert list(raw_commands('f"x" f"{a}: docker build --tag {b}"'))
    assert not list(raw_commands("f\"agent-rl train: {error}; {command_line('agent-rl', 'a')}\""))
    files = [f for package in ("agent_rl", "eval") for f in (REPOSITORY / package).rglob("*.py")]
    assert len(files) > 100
    found = {str(file): list(raw_commands(file.read_text())) for file in files}
    assert {name: texts for name, texts in found.items() if texts} == {}
