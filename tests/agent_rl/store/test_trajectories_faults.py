"""Rows on disk say themselves what they are, and still fit their tokens when read back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from agent_rl.store.trajectories import read_trajectories, write_trajectories
from agent_rl.types import Branch, Group, Status, Trajectory, Turn
from routing_cache import ArrayRows, DigestMismatchError, RowLayout

# More experts than a byte can name, and as many experts a token as real models use.
WIDE = RowLayout(num_hidden_layers=2, moe_layers=(1,), num_experts=384, moe_top_k=5)
MANY = RowLayout(num_hidden_layers=3, moe_layers=(0, 2), num_experts=512, moe_top_k=22)
BYTE = RowLayout(num_hidden_layers=1, moe_layers=(0,), num_experts=255, moe_top_k=5)


def trajectory(member: int, layout: RowLayout | None, missing: tuple[int, ...] = ()) -> Trajectory:
    """Eight tokens of which four were sampled; the ids reach up to the last expert."""
    ids = np.arange(8, dtype=np.int32) + 100 * member
    rows = None
    if layout is not None:
        first = np.array([127, 128, 250, 126, 0, 253, 1]) + layout.num_experts - 255
        wide = (first[:, None, None] + np.arange(layout.moe_top_k)) % layout.num_experts
        wide = np.broadcast_to(wide, (7, layout.num_moe_layers, layout.moe_top_k))
        present = ~np.isin(np.arange(7), missing)
        rows = ArrayRows(layout, ids, wide, present, weight_version=3)
    return Trajectory(
        task_id="t",
        group_id="g",
        member=member,
        status=Status.COMPLETED,
        stop_reason="submit",
        reward=1.0,
        branches=[
            Branch(
                token_ids=ids,
                loss_mask=np.arange(8) >= 4,
                rollout_logprobs=np.full(8, -0.5, np.float32),
                turns=[],
                weight_versions=(3,),
                routed_experts=rows,
            )
        ],
    )


@pytest.mark.parametrize("layout", [WIDE, MANY, BYTE], ids=["uint16", "22 of 512", "uint8"])
def test_each_sample_keeps_its_digest_on_disk(tmp_path: Path, layout: RowLayout) -> None:
    """Four samples, the second without rows, the third with its last row missing; read 2,0,3,1."""
    sent = [trajectory(i, layout) for i in range(4)]
    sent[1], sent[2] = trajectory(1, None), trajectory(2, layout, missing=(6,))
    file = tmp_path / "step.parquet"
    write_trajectories(file, 1, [Group("g", "t", [sent[i] for i in (2, 0, 3, 1)])])
    read = {row["member"]: row for row in read_trajectories(file)}
    assert read[1]["routed_experts"] is None
    for member in (0, 2, 3):
        row, held = read[member], sent[member].branch.routed_experts
        assert isinstance(held, ArrayRows)
        assert row["routed_experts"].dtype == layout.dtype
        assert row["routed_present"] == held.gather()[1].tolist()
        ids = np.array(row["token_ids"], np.int32)
        present = np.array(row["routed_present"][:-1])
        again = ArrayRows(layout, ids, row["routed_experts"][:-1], present, weight_version=3)
        assert again.digest == held.digest
        held.verify(ids)
        other = read[(member + 1) % 4]
        with pytest.raises(DigestMismatchError):
            held.verify(np.array(other["token_ids"], np.int32))
    assert read[2]["routed_present"] == [True] * 6 + [False] * 2


def test_text_that_is_no_unicode_is_written_and_nothing_said_of_a_grade_is_lost(
    tmp_path: Path,
) -> None:
    """Half a surrogate pair comes from an escape in a call's JSON or a file name of stray bytes."""
    odd = trajectory(0, None)
    odd.branch.turns = [Turn(1, 5, "stop", "view \ud800", "no such file: \udce9", 0)]
    odd.error = odd.stop_reason = "x\udfff"
    odd.details = {"grade": "fails \ud800", "tests_passed": 3, "rows_shared_least": 0.5}
    file = tmp_path / "step.parquet"
    write_trajectories(file, 1, [Group("g", "t", [odd, trajectory(1, None)])])
    row, other = read_trajectories(file)
    assert (row["turns"][0]["action"], row["turns"][0]["observation"]) == (
        "view \ufffd",
        "no such file: \ufffd",
    )
    assert row["error"] == row["stop_reason"] == "x\ufffd"
    assert row["details"] == {"grade": "fails \ufffd", "tests_passed": 3, "rows_shared_least": 0.5}
    assert other["details"] == {}


def test_files_without_details_are_read(tmp_path: Path) -> None:
    file = tmp_path / "step.parquet"
    write_trajectories(file, 1, [Group("g", "t", [trajectory(0, None)])])
    table = pq.read_table(file)
    pq.write_table(table.drop_columns(["details"]), file)
    assert read_trajectories(file)[0]["details"] == {}
