"""Statuses by test name from the lines that ``suite_report_plugin`` writes while pytest runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from envs.grading.suite import TestStatus

PLUGIN = "suite_report_plugin"
TARGET_VARIABLE = "SUITE_REPORT"
BAD: frozenset[TestStatus] = frozenset({"FAILED", "ERROR"})


@dataclass(frozen=True)
class Outcomes:
    """Statuses of a test run. ``complete`` is False when it broke off or contradicts itself."""

    statuses: Mapping[str, TestStatus]
    complete: bool
    reason: str = ""


def read_report(report: bytes, nonce: str, exit_code: int | None) -> Outcomes:
    """Read the plugin's report; its lines carry the nonce, its end agrees with the exit code."""
    statuses: dict[str, TestStatus] = {}
    seen: set[tuple[str, str]] = set()
    finish: int | None = None
    problems: list[str] = []
    *lines, rest = report.split(b"\n")
    for line in [*lines, rest] if rest else lines:
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
        if status and statuses.get(name) not in BAD:
            statuses[name] = status
    failed = any(status in BAD for status in statuses.values())
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
        case [str(mark), [str(name), "finish", int() as outcome, bool(xfail)]]:
            return (name, "finish", outcome, xfail) if mark == nonce else None
        case [str(mark), [str(name), str(when), str() as outcome, bool(xfail)]]:
            return (name, when, outcome, xfail) if mark == nonce and when != "finish" else None
        case _:
            return None


def _status(when: str, outcome: str, xfail: bool) -> TestStatus | None:
    """Return the status that one phase gives a test, None where the phase says nothing."""
    if outcome == "failed":
        return "FAILED" if when == "call" else "ERROR"
    if outcome == "skipped":
        return "XFAIL" if xfail else "SKIPPED"
    if when != "call":
        return None
    return "XPASS" if xfail else "PASSED"
