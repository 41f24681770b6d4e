"""Statuses by test name: from the plugin's report, or where there is none from what was printed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from envs.images.task import NameStyle

_ANSI = re.compile(rb"\x1b\[[0-9;]*m|\r")
_SUMMARY = re.compile(r"^=+ short test summary info =+$", re.MULTILINE)
_LINE = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (.+)$")
_BAD = frozenset({"FAILED", "ERROR"})
_UNITTEST = re.compile(
    r"^(\w+) \(([\w.]+)\)(?: \.\.\. |\n.*? \.\.\. )(ok|FAIL|ERROR|skipped.*)$", re.MULTILINE
)
_UNITTEST_STATUS = {"ok": "PASSED", "FAIL": "FAILED", "ERROR": "ERROR"}


@dataclass(frozen=True)
class Outcomes:
    """What a test run said. ``complete`` is False when it broke off or contradicts itself."""

    statuses: Mapping[str, str]
    complete: bool
    reason: str = ""


def read_report(report: bytes, nonce: str, exit_code: int | None) -> Outcomes:
    """The plugin's report; its lines carry the nonce, its end agrees with the exit code."""
    statuses: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    finish: int | None = None
    problems: list[str] = []
    for line in report.splitlines():
        record = _record(line, nonce)
        if record is None or finish is not None:
            problems.append("a line that the plugin did not write")
            continue
        name, when, outcome, xfail = record
        if when == "finish":
            finish = int(outcome)
            continue
        if (name, when) in seen:
            problems.append(f"{name} is reported twice")
        seen.add((name, when))
        status = _status(when, str(outcome), xfail)
        if status and statuses.get(name) not in _BAD:
            statuses[name] = status
    failed = any(status in _BAD for status in statuses.values())
    if finish is None:
        problems.append("the run broke off")
    elif exit_code not in (0, 1) or finish != exit_code or (exit_code == 0) == failed:
        problems.append(f"report and exit code disagree: {finish}, {exit_code}")
    return Outcomes(statuses, not problems, "; ".join(dict.fromkeys(problems)))


def _record(line: bytes, nonce: str) -> tuple[str, str, str | int, bool] | None:
    try:
        value = cast(object, json.loads(line))
    except (ValueError, RecursionError):
        return None
    match value:
        case [str(mark), [str(name), str(when), str() | int() as outcome, bool(xfail)]]:
            return (name, when, outcome, xfail) if mark == nonce else None
        case _:
            return None


def _status(when: str, outcome: str, xfail: bool) -> str:
    if outcome == "failed":
        return "FAILED" if when == "call" else "ERROR"
    if outcome == "skipped":
        return "XFAIL" if xfail else "SKIPPED"
    if when != "call":
        return ""
    return "XPASS" if xfail else "PASSED"


def read_printed(log: bytes, exit_code: int | None) -> Outcomes:
    """The last summary that pytest printed, or unittest's lines. Forgeable: for runners without
    the plugin."""
    text = _ANSI.sub(b"", log).decode("utf-8", "replace")
    parts = _SUMMARY.split(text)
    statuses: dict[str, str] = {}
    if len(parts) > 1:
        for line in parts[-1].split("\n"):
            if match := _LINE.match(line):
                name = _cut_message(match.group(2), match.group(1))
                if (
                    statuses.get(name) not in _BAD
                ):  # a name that is there twice failed if either did
                    statuses[name] = match.group(1)
    else:
        for name, owner, word in _UNITTEST.findall(text):
            name = f"{owner.rpartition('.')[2]}.{name}"
            if statuses.get(name) not in _BAD:
                statuses[name] = _UNITTEST_STATUS.get(word, "SKIPPED")
    complete = exit_code is not None and bool(statuses)
    return Outcomes(statuses, complete, "" if complete else "no summary was printed")


def _cut_message(name: str, status: str) -> str:
    """Only a failure's line has `` - message`` after the name.

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
    """Names in the style of the task. R2E-Gym leaves the file out and joins the rest with dots.

    Two tests that get one name count as failed when either did.
    """
    if style == "node_id":
        return dict(statuses)
    renamed: dict[str, str] = {}
    for name, status in statuses.items():
        short = ".".join(name.split("::")[1:])
        if short and renamed.get(short) not in _BAD:
            renamed[short] = status
    return renamed


def unexpected(statuses: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """Tests that ran but that nobody asked for. Skipped and expectedly failing ones do not count:
    R2E-Gym's data leaves them out."""
    return sorted(
        name
        for name, status in statuses.items()
        if name not in expected and status in ("PASSED", *_BAD)
    )


def normal_expected(expected: Mapping[str, str]) -> dict[str, str]:
    """Without the colour codes and the messages after failing names that R2E-Gym's data has."""
    cleaned: dict[str, str] = {}
    for name, status in expected.items():
        plain = _cut_message(_ANSI.sub(b"", name.encode()).decode(), status)
        if plain:
            cleaned[plain] = status
    return cleaned
