"""Two ranks in every layout take the step that one process takes, with every term in the loss."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixture_types import MakePolicy

CHECKS = Path(__file__).with_name("objective_parallel_checks.py")
DEADLINE_S = 400
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "data, optimizer split": {"distributed_optimizer": True},
    "context": {"context_parallel": 2},
    "context, packed": {"context_parallel": 2, "packed": True},
    "tensor and sequence": {"tensor_parallel": 2, "sequence_parallel": True},
    "expert": {"expert_parallel": 2},
    "pipeline": {"pipeline_parallel": 2},
    "pipeline, recomputed": {"pipeline_parallel": 2, "recompute": "full"},
}


def launch(folder: Path, policy: Path, layouts: dict[str, Any], num_ranks: int) -> dict[str, Any]:
    job, out = folder / f"job{num_ranks}.json", folder / f"out{num_ranks}.json"
    job.write_text(json.dumps(layouts))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rendezvous = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(CHECKS), str(policy), str(out), str(job)],
            env={**os.environ, **rendezvous, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [0] * num_ranks, outputs
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def results(make_policy: MakePolicy, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("objective")
    policy = make_policy(num_hidden_layers=4, mlp_only_layers=[0])
    one = launch(folder, policy, {"one process": {}}, 1)
    return one | launch(folder, policy, LAYOUTS, 2)


@pytest.mark.slow
@pytest.mark.megatron
@pytest.mark.parametrize("layout", LAYOUTS)
def test_metrics_and_update_are_those_of_one_process(results: dict[str, Any], layout: str) -> None:
    ours, expected = results[layout], results["one process"]
    assert ours["metrics"].keys() == expected["metrics"].keys()
    assert expected["metrics"]["router_consistency"] > 0.1
    assert expected["metrics"]["kl_reference"] > 0.1
    assert 0 < expected["metrics"]["correction_masked"] < 1
    assert expected["metrics"]["ratio_max"] > 1.01
    for name, value in expected["metrics"].items():
        assert ours["metrics"][name] == pytest.approx(value, rel=2e-4, abs=1e-6), name
    for name, moved in expected["moved"].items():
        error = np.linalg.norm(np.subtract(ours["moved"][name], moved))
        assert error <= 1e-3 * np.linalg.norm(moved) + 1e-7, name
