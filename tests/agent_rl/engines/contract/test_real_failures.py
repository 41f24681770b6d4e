"""Real servers killed in mid-rollout, and a real training run.

Only with real engines.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import orjson
import pytest
from conftest import REAL, EngineKind, Policies, deployment, transfer
from contract_cases import UnderTest, ask, prompt_of

from agent_rl.engines.http.server_fleet import ServerFleet

NUM_TRAJECTORIES, NUM_TURNS, KILL_AT = 4, 5, 2
CONFIG = Path(__file__).parents[4] / "configs" / "repair_tiny_sglang.yaml"


def kill_server(fleet: ServerFleet) -> None:
    """SIGKILL to every process of the server's group, guard included: no clean-up runs."""
    group = fleet.supervisors[0].process.group
    assert group is not None
    os.killpg(group, signal.SIGKILL)


@pytest.mark.sglang
@pytest.mark.parametrize("num_servers", [1, 2])
@pytest.mark.parametrize("kind", REAL)
def test_a_killed_server_loses_no_trajectory_and_gets_its_weights_back(
    kind: EngineKind, num_servers: int, policies: Policies, tmp_path: Path
) -> None:
    """Alone, it is waited for; beside another one, its sessions move. Weights come from disk."""
    settings = {"weight_transfer": "disk", "num_servers": num_servers}
    fleet = ServerFleet(deployment(kind, policies, tmp_path, **settings))
    under_test = UnderTest(
        fleet,
        policies.reference_before,
        policies.reference_after,
        keeps_order=kind == "sglang",
        block_size=1,
    )

    killed = asyncio.Event()
    at_kill = asyncio.Barrier(NUM_TRAJECTORIES)

    async def trajectory(number: int) -> None:
        prompt, have = prompt_of(30, seed=50 + number), 0
        for turn in range(NUM_TURNS):
            request = ask(prompt, session=f"t{number}", start=have, new=12)
            if turn == KILL_AT:
                await at_kill.wait()  # every server has requests running when one is killed
            call = asyncio.ensure_future(fleet.generate(request))
            if turn == KILL_AT and not killed.is_set():
                killed.set()
                await asyncio.sleep(0.05)
                kill_server(fleet)
            completion = await call
            assert completion.weight_versions == (1,)
            under_test.check(prompt, completion, updated=1)
            whole = np.concatenate([prompt, completion.token_ids])
            have = len(whole) - 1
            prompt = np.concatenate([whole, prompt_of(6, seed=turn)])

    async def scenario() -> None:
        try:
            weights = policies.reference_after.model.named_parameters()
            await fleet.load_weights({name: p.detach() for name, p in weights}, 1)
            await asyncio.gather(*(trajectory(n) for n in range(NUM_TRAJECTORIES)))
            metrics = fleet.metrics()
            assert metrics["fleet_server_restarts"] == 1
            assert metrics["fleet_engines_revived"] >= num_servers % 2
            assert (metrics["fleet_moved_sessions"] > 0) == (num_servers > 1)
            assert metrics["engine_unavailable"] >= 1
            assert metrics["engine_bad_replies"] == metrics["engine_stale_replies"]
        finally:
            await fleet.aclose()

    asyncio.run(scenario())


@pytest.mark.sglang
@pytest.mark.megatron
@pytest.mark.parametrize("kind", REAL)
def test_two_steps_of_training_on_a_real_server(kind: EngineKind, tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-c", "from agent_rl.cli import main; main()", "train", str(CONFIG)),
        *(f"engine.kind={kind}", f"engine.weight_transfer={transfer(kind)}"),
        *(f"run_root={tmp_path}", "train.steps=2", "eval.num_tasks=4", "tasks.num_heldout=8"),
        *("tasks.num_train=64", "algorithm.groups_per_step=4", "sandbox.num_workers=2"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (metrics_file,) = tmp_path.glob("*/metrics.jsonl")
    steps = [orjson.loads(line) for line in metrics_file.read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["num_failed"] == 0
        assert step["replayed_fraction"] == 1.0
        # Step 2 samples with weights that the trainer pushed after step 1.
        assert step["abs_logprob_gap"] < 1e-5
    assert any(step["grad_norm"] > 0 for step in steps)
