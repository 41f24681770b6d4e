"""Verdicts read from what the official harness left of one instance.

A verdict is its ``report.json``. What it calls an "error" is told apart by its logs: a patch that
does not apply, a time-out, or trouble with the machinery.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from eval.outcomes import Outcome

_APPLY_FAILED = ">>>>> Patch Apply Failed"
_TIMED_OUT = re.compile(
    r"Test timed out after \d+ seconds|^Timeout error: \d+ seconds", re.MULTILINE
)
_LOG_CHARS = 200_000


@dataclass(frozen=True)
class Grade:
    """The verdict on one prediction. ``test_log`` is the test output, cut in the middle."""

    outcome: Outcome
    reason: str = ""
    tests_passed: int = 0
    tests_failed: int = 0
    test_log: str = ""


def read_verdict(folder: Path, instance_id: str) -> Grade | None:
    """Return the verdict in an instance's log ``folder``; None when nothing was run there."""
    output = read_or_empty(folder / "test_output.txt")
    log = read_or_empty(folder / "run_instance.log")
    report = _read_report(folder / "report.json", instance_id)
    if report is not None:
        return _graded(report, output)
    if _APPLY_FAILED in log:
        reason = log.partition(_APPLY_FAILED)[2].strip(": \n").partition("\nTraceback")[0]
        return Grade(Outcome.DOES_NOT_APPLY, _short(reason))
    if match := _TIMED_OUT.search(f"{log}\n{output}"):
        return Grade(Outcome.TIMEOUT, match.group(0), test_log=_cut(output))
    if not log:
        return None
    return Grade(Outcome.INFRASTRUCTURE, _short(_last_error(log)), test_log=_cut(output))


def read_or_empty(file: Path) -> str:
    """Return the text of ``file``, bytes that are not UTF-8 replaced; empty when it is absent."""
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def _graded(report: Mapping[str, object], output: str) -> Grade:
    tests = report.get("tests_status")
    groups = cast("Mapping[str, Mapping[str, list[str]]]", tests if isinstance(tests, dict) else {})
    wanted = [groups.get(name, {}) for name in ("FAIL_TO_PASS", "PASS_TO_PASS")]
    passed = sum(len(group.get("success", [])) for group in wanted)
    failed = [name for group in wanted for name in group.get("failure", [])]
    if report.get("resolved") is True:
        outcome, reason = Outcome.RESOLVED, ""
    elif report.get("infra_failure") is True:
        outcome, reason = Outcome.INFRASTRUCTURE, str(report.get("infra_failure_reason", ""))
    elif groups:
        outcome, reason = Outcome.UNRESOLVED, f"fails {len(failed)}: {', '.join(failed[:3])}"
    else:
        outcome, reason = Outcome.UNRESOLVED, "the test run gave no results that can be read"
    return Grade(outcome, _short(reason), passed, len(failed), _cut(output))


def _read_report(file: Path, instance_id: str) -> Mapping[str, object] | None:
    """Return the instance's part of a ``report.json``; None when it is absent, cut short or of
    another shape."""
    try:
        loaded = cast(object, json.loads(read_or_empty(file)))
    except ValueError:
        return None
    part = (
        cast("Mapping[str, object]", loaded).get(instance_id) if isinstance(loaded, dict) else None
    )
    usable = isinstance(part, dict) and isinstance(part.get("resolved"), bool)
    return cast("Mapping[str, object]", part) if usable else None


def _last_error(log: str) -> str:
    lines = [line for line in log.splitlines() if "Error" in line or "error" in line]
    return lines[-1] if lines else "the harness gave no verdict"


def _short(text: str) -> str:
    return text if len(text) <= 500 else f"{text[:500]}…"


def _cut(text: str) -> str:
    half = _LOG_CHARS // 2
    return text if len(text) <= _LOG_CHARS else f"{text[:half]}\n[… cut …]\n{text[-half:]}"
