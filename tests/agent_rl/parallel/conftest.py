"""Worlds are started once a session: start-up costs more than a combination."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from combinations import COMBINATIONS, QUICK
from launch_ranks import Launcher, Results
from results_table import write_table


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    return Launcher(tmp_path_factory.mktemp("parallel"))


@pytest.fixture(scope="session")
def quick_results(launcher: Launcher) -> Results:
    return launcher.run(QUICK)


@pytest.fixture(scope="session")
def all_results(launcher: Launcher) -> Results:
    """Every combination; where AGENT_RL_PARALLEL_TABLE names a file, the table goes there."""
    results: Results = {}
    for processes in sorted({combination.processes for combination in COMBINATIONS}):
        results |= launcher.run([c for c in COMBINATIONS if c.processes == processes])
    if table := os.environ.get("AGENT_RL_PARALLEL_TABLE"):
        write_table(Path(table), COMBINATIONS, results)
    return results
