"""The page of reported faults: every one has tests, and the tests are there."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/faults.md").read_text()

# The reported faults. A code that is added here needs a row, or a reason under "Not covered".
CODES = (
    *("A1", "A2", "A4", "A6", "A7"),
    *("B1", "B3", "B4", "B5"),
    *("C2", "C3"),
    *("D1", "D2", "D4", "D5", "D6"),
    *("E1",),
    *("F1", "F2", "F4", "F5", "F7"),
    *("G1", "G3", "G4", "G5"),
    *("H1", "H2"),
)
NUM_COVERED_IN_PART = 2
NUM_NOT_COVERED = 0

ROWS = re.findall(r"^\| ([A-Z]\d+) \| (.+) \| (.+) \|$", PAGE, re.MULTILINE)


def section(title: str) -> list[tuple[str, str]]:
    """Code and reason of every item of the section."""
    text = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"^- ([A-Z]\d+): (.+)$", text, re.MULTILINE)


def named_tests(cell: str) -> list[str]:
    names = cell.split("<br>")
    assert all(re.fullmatch(r"`tests/[\w/]+\.py(::\w+)+`", name) for name in names), cell
    return [name.strip("`") for name in names]


def is_test(node_id: str) -> bool:
    """Tell if the file, or the class in it, has a test function of that name."""
    file, *path = node_id.split("::")
    if not (ROOT / file).is_file():
        return False
    nodes: list[ast.stmt] = ast.parse((ROOT / file).read_text()).body
    for name in path[:-1]:
        classes = [n for n in nodes if isinstance(n, ast.ClassDef) and n.name == name]
        nodes = [n for found in classes for n in found.body]
    return path[-1].startswith("test_") and any(
        isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name == path[-1] for n in nodes
    )


def test_every_fault_is_there_once() -> None:
    counts = Counter([code for code, _, _ in ROWS] + [code for code, _ in section("Not covered")])
    assert sorted(set(CODES) - set(counts)) == []
    assert sorted(set(counts) - set(CODES)) == []
    assert [code for code, count in counts.items() if count > 1] == []


def test_no_row_is_written_in_a_form_that_is_not_read() -> None:
    lines = [line for line in PAGE.splitlines() if line.startswith("|")]
    assert len(lines) == len(ROWS) + 2  # heading and rule


@pytest.mark.parametrize(("code", "fault", "cell"), ROWS, ids=[code for code, _, _ in ROWS])
def test_a_fault_has_one_to_three_tests_that_exist(code: str, fault: str, cell: str) -> None:
    tests = named_tests(cell)
    assert 1 <= len(tests) <= 3
    assert len(set(tests)) == len(tests)
    assert [name for name in tests if not is_test(name)] == [], f"{code}: {fault}"


def test_what_is_not_covered_is_counted_and_has_a_reason() -> None:
    assert len(section("Not covered")) == NUM_NOT_COVERED
    in_part = section("Covered in part")
    assert len(in_part) == NUM_COVERED_IN_PART
    assert {code for code, _ in in_part} <= {code for code, _, _ in ROWS}
    assert all(len(why.split()) > 3 for _, why in in_part + section("Not covered"))


@pytest.mark.parametrize(
    "node_id",
    [
        "tests/no_such_file.py::test_every_fault_is_there_once",
        "tests/test_faults_page.py::test_no_such_test",
        "tests/test_faults_page.py::section",
        "tests/test_faults_page.py::TestNothing::test_every_fault_is_there_once",
    ],
)
def test_a_test_that_is_not_there_would_be_noticed(node_id: str) -> None:
    assert is_test("tests/test_faults_page.py::test_every_fault_is_there_once")
    assert not is_test(node_id)
