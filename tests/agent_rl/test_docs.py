"""The pages in docs/: links lead somewhere, and every piece of evidence says what made it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from agent_rl.cli import app
from agent_rl.commands.bench import bench_app
from agent_rl.commands.study import study_app

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def commands(page: Path) -> list[list[str]]:
    """Every ``agent-rl`` command in a code block or between backticks."""
    text = page.read_text().replace("\\\n", " ")
    found = re.findall(r"^agent-rl ([^#\n]+)|`agent-rl ([^`]+)`", text, re.MULTILINE)
    return [shlex.split(block or inline) for block, inline in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_commands_have_the_options_that_there_are(page: Path) -> None:
    groups = {"bench": get_command(bench_app), "study": get_command(study_app)}
    for words in commands(page):
        command = groups.get(words[0]) or getattr(get_command(app), "commands").get(words[0])  # noqa: B009
        if words[0] in groups and len(words) > 1:
            command = getattr(command, "commands")[words[1]]  # noqa: B009
        if command is None:
            assert words[0] in ("tasks", "swebench"), words  # of packages above this one
            continue
        known = {option for parameter in command.params for option in parameter.opts}
        asked = [word for word in words if word.startswith("--")]
        assert [option for option in asked if option not in known] == [], words


def test_every_piece_of_evidence_says_what_made_it() -> None:
    page = (DOCS / "evidence" / "README.md").read_text()
    files = [file.name for file in (DOCS / "evidence").iterdir() if file.suffix != ".md"]
    assert [name for name in sorted(files) if f"`{name}`" not in page] == []
    named = re.findall(r"`([\w.-]+\.(?:png|json))`", page)
    kept = [name for name in named if name not in ("results.json", "curves.png")]
    assert [name for name in kept if name not in files] == []
