"""Trajectories as Parquet, routing rows included: one file per step, one row per branch.

An agent that only appends makes one branch; one that failed before the model spoke has a row with
no tokens, so that a trajectory is never absent. Counting trajectories is counting ``branch`` 0.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from agent_rl.types import Branch, Group, Trajectory
from envs.actions.observation import unicode_only

_TURN = pa.struct(
    [
        ("prompt_end", pa.int32()),
        ("completion_end", pa.int32()),
        ("finish_reason", pa.string()),
        ("action", pa.string()),
        ("observation", pa.string()),
        ("rows_requested", pa.int32()),
        ("seconds_generate", pa.float32()),
        ("seconds_environment", pa.float32()),
    ]
)
SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("group_id", pa.string()),
        ("task_id", pa.string()),
        ("member", pa.int32()),
        ("branch", pa.int32()),  # 0 is the first; verdict and patch are the trajectory's
        ("num_shared_turns", pa.int32()),  # leading turns that an earlier branch holds
        ("status", pa.string()),
        ("stop_reason", pa.string()),
        ("reward", pa.float32()),
        ("error", pa.string()),
        ("details", pa.string()),  # a JSON object: why it was graded so, tests passed, attempts, …
        ("patch", pa.binary()),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("rollout_logprobs", pa.list_(pa.float32())),
        ("turns", pa.list_(_TURN)),
        ("weight_versions", pa.list_(pa.int32())),
        # [T, L, K] as raw little-endian bytes; absent rows are marked in routed_present
        ("routed_experts", pa.binary()),
        ("routed_shape", pa.list_(pa.int32())),
        ("routed_dtype", pa.string()),
        ("routed_present", pa.list_(pa.bool_())),
    ]
)


def write_trajectories(file: Path, step: int, groups: Sequence[Group]) -> None:
    """Write every trajectory, failed ones too. The file appears whole or not at all."""
    everyone = [t for group in groups for t in group.trajectories]
    rows = [
        _row(step, trajectory, number, branch)
        for trajectory in everyone
        for number, branch in enumerate(trajectory.branches or [_NOTHING])
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), temporary, compression="zstd")
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def read_trajectories(file: Path) -> list[dict[str, Any]]:
    """Rows of a trajectory file; ``routed_experts`` as ``[T, L, K]``, None where not captured.

    ``details`` are those of the trajectory, empty in files of earlier versions, whose rows are
    trajectories of one branch.
    """
    rows = pq.read_table(file).to_pylist()
    for row in rows:
        row["details"] = orjson.loads(row.get("details") or "{}")
        row["branch"] = row.get("branch") or 0
        if row["routed_experts"] is not None:
            flat = np.frombuffer(row["routed_experts"], np.dtype(row["routed_dtype"]))
            row["routed_experts"] = flat.reshape(row["routed_shape"])
    return rows


_NOTHING = Branch(np.zeros(0, np.int32), np.zeros(0, np.bool_), np.zeros(0, np.float32), [], ())


def _row(step: int, trajectory: Trajectory, number: int, branch: Branch) -> dict[str, Any]:
    row: dict[str, Any] = {
        "step": step,
        "group_id": trajectory.group_id,
        "task_id": unicode_only(trajectory.task_id),
        "member": trajectory.member,
        "branch": number,
        "num_shared_turns": branch.num_shared_turns,
        "status": str(trajectory.status),
        "stop_reason": unicode_only(trajectory.stop_reason),
        "reward": trajectory.reward,
        "error": unicode_only(trajectory.error),
        "details": _json(trajectory.details),
        "patch": trajectory.patch,
        "token_ids": branch.token_ids,
        "loss_mask": branch.loss_mask,
        "rollout_logprobs": branch.rollout_logprobs,
        "turns": [
            {field.name: _plain(getattr(turn, field.name)) for field in _TURN}
            for turn in branch.turns
        ],
        "weight_versions": list(branch.weight_versions),
    }
    if branch.routed_experts is not None:
        rows, present = branch.routed_experts.gather()
        little = rows.astype(rows.dtype.newbyteorder("<"), copy=False)
        row |= {
            "routed_experts": little.tobytes(),
            "routed_shape": list(rows.shape),
            "routed_dtype": little.dtype.str,
            "routed_present": present,
        }
    return row


def _json(details: Mapping[str, str | int | float]) -> str:
    return orjson.dumps({key: _plain(value) for key, value in details.items()}).decode()


def _plain(value: object) -> object:
    """Return text fit for the file: what an agent or sandbox said must not stop the writing."""
    return unicode_only(value) if isinstance(value, str) else value
