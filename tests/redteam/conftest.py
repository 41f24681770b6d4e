"""Helpers of the container tests, and a table of every attempt at the end of the run."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS / "envs" / "docker"))

from docker_fixtures import docker_host  # noqa: E402
from redteam_report import Attempt  # noqa: E402

__all__ = ["docker_host"]


ATTEMPTS = pytest.StashKey[list[Attempt]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ATTEMPTS] = []


@pytest.fixture
def attempts(request: pytest.FixtureRequest) -> list[Attempt]:
    return request.config.stash[ATTEMPTS]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    attempts = config.stash[ATTEMPTS]
    if not attempts:
        return
    won = sum(attempt.reward != 0.0 for attempt in attempts)
    terminalreporter.section(f"red team: {len(attempts)} attempts, {won} successes")
    for attempt in attempts:
        noticed = f" [{'; '.join(attempt.noticed)}]" if attempt.noticed else ""
        terminalreporter.line(
            f"{attempt.sandbox:10} {attempt.name:42} {attempt.reward}"
            f"  {attempt.reason[:90]}{noticed[:120]}"
        )
    if path := os.environ.get("AGENT_RL_REDTEAM_JSON"):
        Path(path).write_text(json.dumps([asdict(attempt) for attempt in attempts], indent=1))
