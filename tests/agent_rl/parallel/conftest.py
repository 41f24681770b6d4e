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
def all_results(launcher: Launcher, request: pytest.FixtureRequest) -> Results:
    """Every combination that this run selected (``-k``).

    When that is all of them and AGENT_RL_PARALLEL_TABLE names a file, the table goes there.
    """
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    chosen = {c.params["combination"].name for c in calls if c and "combination" in c.params}
    results: Results = {}
    for processes in sorted({combination.processes for combination in COMBINATIONS}):
        picked = [c for c in COMBINATIONS if c.processes == processes and c.name in chosen]
        results |= launcher.run(picked)
    table = os.environ.get("AGENT_RL_PARALLEL_TABLE")
    if table and len(results) == len(COMBINATIONS):
        write_table(Path(table), COMBINATIONS, results)
    return results
