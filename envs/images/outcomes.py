"""Names and statuses of an image's tests: from what was printed, in the style of its data set."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import cast

from envs.grading.plugin_report import BAD, Outcomes
from envs.grading.suite import TestStatus
from envs.images.task import NameStyle

_ANSI = re.compile(rb"\x1b\[[0-9;]*m|\r")
_SUMMARY = re.compile(r"^=+ short test summary info =+$", re.MULTILINE)
_LINE = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (.+)$")
_UNITTEST = re.compile(
    r"^(\w+) \(([\w.]+)\)(?: \.\.\. |\n.*? \.\.\. )(ok|FAIL|ERROR|skipped.*)$", re.MULTILINE
)
_UNITTEST_STATUS: Mapping[str, TestStatus] = {"ok": "PASSED", "FAIL": "FAILED", "ERROR": "ERROR"}


def read_printed(log: bytes, exit_code: int | None) -> Outcomes:
    """Read the last summary that pytest printed, or unittest's lines.

    Forgeable: for runners without the plugin.
    """
    text = _ANSI.sub(b"", log).decode("utf-8", "replace")
    parts = _SUMMARY.split(text)
    statuses: dict[str, TestStatus] = {}
    if len(parts) > 1:
        for line in parts[-1].split("\n"):
            if match := _LINE.match(line):
                status = cast(TestStatus, match.group(1))
                name = _cut_message(match.group(2), status)
                if statuses.get(name) not in BAD:  # a name that is there twice failed if one did
                    statuses[name] = status
    else:
        for name, owner, word in _UNITTEST.findall(text):
            name = f"{owner.rpartition('.')[2]}.{name}"
            if statuses.get(name) not in BAD:
                statuses[name] = _UNITTEST_STATUS.get(word, "SKIPPED")
    complete = exit_code is not None and bool(statuses)
    return Outcomes(statuses, complete, "" if complete else "no summary was printed")


def _cut_message(name: str, status: str) -> str:
    """Cut `` - message`` off, which only a failure's line has after the name.

    Names may hold blanks and dashes within their brackets, messages may hold brackets: the name
    ends at the first `` - `` that no bracket of the name encloses.
    """
    if status == "PASSED":
        return name
    cut, bracket = name.find(" - "), name.find("[")
    if 0 <= bracket < cut:
        closed = name.find("] - ", bracket)
        cut = closed + 1 if closed >= 0 else -1
    return name if cut < 0 else name[:cut]


def rename(statuses: Mapping[str, str], style: NameStyle) -> dict[str, str]:
    """Spell names in the style of the task; R2E-Gym leaves the file out and joins the rest by dots.

    Two tests that get one name count as failed when either did.
    """
    if style == "node_id":
        return dict(statuses)
    renamed: dict[str, str] = {}
    for name, status in statuses.items():
        short = ".".join(name.split("::")[1:])
        if short and renamed.get(short) not in BAD:
            renamed[short] = status
    return renamed


def unexpected(statuses: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """List tests that ran although nobody asked for them.

    Skipped and expectedly failing ones do not count: R2E-Gym's data leaves them out.
    """
    return sorted(
        name
        for name, status in statuses.items()
        if name not in expected and status in ("PASSED", *BAD)
    )


def normal_expected(expected: Mapping[str, str]) -> dict[str, str]:
    """Remove the colour codes, and the messages after failing names, that R2E-Gym's data has."""
    cleaned: dict[str, str] = {}
    for name, status in expected.items():
        plain = _cut_message(_ANSI.sub(b"", name.encode()).decode(), status)
        if plain:
            cleaned[plain] = status
    return cleaned
