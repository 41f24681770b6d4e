"""What served engines count reaches metrics.jsonl, and docs/metrics.md explains all of it."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
from loop_fakes import Notes, assembly, group

from agent_rl.config.schema import RunConfig
from agent_rl.engines.balanced import BalancedStats
from agent_rl.engines.http.engine_counters import EngineStats
from agent_rl.engines.scripted import ScriptedGenerator
from agent_rl.metrics.sink import MetricsSink
from agent_rl.run.training_run import _TrainingRun
from agent_rl.store.run_folder import RunFolder, read_metrics

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


class Served(ScriptedGenerator):
    def metrics(self) -> dict[str, float]:
        return {"engine_bad_replies": 3.0, "fleet_in_service": 1.0}


def test_counters_of_servers_are_logged_with_every_step(tmp_path: Path) -> None:
    config = RunConfig(run_root=str(tmp_path))
    parts = assembly(config)
    served = Served(lambda request, turn: np.array([1], np.int32))
    folder = RunFolder.create(config)
    for engine in (parts.rollout.engine, served):
        now = replace(parts, rollout=replace(parts.rollout, engine=engine))
        run = _TrainingRun(config, folder, Notes(), now)
        with MetricsSink(folder.metrics_file, folder.tensorboard) as sink:
            run.sink = sink
            run.step_done(1, [group("g", [1.0, 0.0])], {"time_step_s": 1.0})
    folder.close()
    embedded, with_servers = read_metrics(folder.metrics_file)
    assert not [key for key in embedded if key.startswith(("engine_", "fleet_"))]
    assert (with_servers["engine_bad_replies"], with_servers["fleet_in_service"]) == (3.0, 1.0)
    asyncio.run(parts.rollout.aclose())


def test_every_counter_is_explained_and_none_that_is_not_counted() -> None:
    counted = set(EngineStats().to_metrics("engine"))
    counted |= {f"fleet_{name}" for name in vars(BalancedStats())}
    counted |= {"fleet_in_service", "fleet_server_restarts"}
    assert set(re.findall(r"`((?:engine|fleet)_\w+)`", PAGE.read_text())) == counted
