"""What `make check` cannot see of the house: rooms, and docstrings that are read once."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("agent_rl", "envs", "eval", "routing_cache")
MODULES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
QUESTION = re.compile(r"(What|Whether|How|Which|Where|When|Who|Why)\b")


def test_at_the_top_of_agent_rl_are_the_loop_and_rooms() -> None:
    files = {path.name for path in (ROOT / "agent_rl").glob("*.py")}
    assert files == {"__init__.py", "cli.py", "errors.py", "loop.py", "protocols.py", "types.py"}


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_open_with_a_verb_or_a_noun(package: str) -> None:
    questions: list[str] = []
    for path in (path for path in MODULES if path.is_relative_to(ROOT / package)):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(
                node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            ):
                continue
            text = ast.get_docstring(node) or ""
            if QUESTION.match(text):
                line = getattr(node, "lineno", 1)
                questions.append(f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}")
    assert not questions


def test_the_loop_fits_its_page() -> None:
    tree = ast.parse((ROOT / "agent_rl/loop.py").read_text())
    steps = next(n for n in tree.body if getattr(n, "name", "") == "train_steps")
    assert isinstance(steps, ast.AsyncFunctionDef)
    assert steps.end_lineno is not None
    assert steps.end_lineno - steps.lineno < 30
