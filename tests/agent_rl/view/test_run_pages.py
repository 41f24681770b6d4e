"""Pages of a training run, from files that the run's own writer makes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from agent_rl.store.trajectories import write_trajectories
from agent_rl.types import Branch, Group, Status, Trajectory, Turn
from agent_rl.view.run_pages import NoTrajectoriesError, write_run_pages


def make_trajectory(member: int, reward: float | None) -> Trajectory:
    status = Status.COMPLETED if reward is not None else Status.FAILED
    turn = Turn(3, 5, "stop", "submit", "over", 4, 0.5, 0.25)
    return Trajectory(
        task_id=f"task<{member}>",
        group_id="g",
        member=member,
        status=status,
        stop_reason="submit",
        reward=reward,
        branches=[
            Branch(
                token_ids=np.arange(5, dtype=np.int32),
                loss_mask=np.zeros(5, dtype=np.bool_),
                rollout_logprobs=np.zeros(5, dtype=np.float32),
                turns=[turn],
                weight_versions=(1,),
            )
        ],
        patch=b"+caf\xe9\n",
        error="" if reward is not None else "daemon gone",
        details={} if reward is None else {"grade": f"{reward:g} of 1 tests as expected"},
    )


def test_every_trajectory_of_the_wanted_steps_has_a_page(tmp_path: Path) -> None:
    run = tmp_path / "run"
    members = [make_trajectory(0, 1.0), make_trajectory(1, 0.0), make_trajectory(2, None)]
    for step in (1, 2):
        file = run / "trajectories" / f"step-{step:06d}.parquet"
        write_trajectories(file, step, [Group("g", "t", members)])

    def decode(ids: Sequence[int]) -> str:
        return f"prompt {list(ids)}"

    index = write_run_pages(run, tmp_path / "html", steps=[2], decode=decode)
    text = index.read_text()
    assert "task&lt;0&gt;" in text
    assert text.count('href="step-000002-') == 3
    assert "step-000001" not in text
    for label in ("resolved", "unresolved", "failed"):
        assert f">{label}<" in text
    assert "0 of 1 tests as expected" in (tmp_path / "html" / "step-000002-00001.html").read_text()
    page = (tmp_path / "html" / "step-000002-00002.html").read_text()
    assert "daemon gone" in page
    assert "prompt [0, 1, 2]" in page
    with pytest.raises(NoTrajectoriesError, match=r"got=\[9\] expected some of \[1, 2\]"):
        write_run_pages(run, tmp_path / "html", steps=[9])
