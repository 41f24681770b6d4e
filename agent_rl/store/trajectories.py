"""Trajectories as Parquet, routing rows included: one file per step, one row per trajectory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from agent_rl.types import Group, Trajectory
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
    rows = [_row(step, t) for group in groups for t in group.trajectories]
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

    ``details`` are those of the trajectory, empty in files of earlier versions.
    """
    rows = pq.read_table(file).to_pylist()
    for row in rows:
        row["details"] = orjson.loads(row.get("details") or "{}")
        if row["routed_experts"] is not None:
            flat = np.frombuffer(row["routed_experts"], np.dtype(row["routed_dtype"]))
            row["routed_experts"] = flat.reshape(row["routed_shape"])
    return rows


def _row(step: int, trajectory: Trajectory) -> dict[str, Any]:
    row: dict[str, Any] = {
        "step": step,
        "group_id": trajectory.group_id,
        "task_id": unicode_only(trajectory.task_id),
        "member": trajectory.member,
        "status": str(trajectory.status),
        "stop_reason": unicode_only(trajectory.stop_reason),
        "reward": trajectory.reward,
        "error": unicode_only(trajectory.error),
        "details": _json(trajectory.details),
        "patch": trajectory.patch,
        "token_ids": trajectory.token_ids,
        "loss_mask": trajectory.loss_mask,
        "rollout_logprobs": trajectory.rollout_logprobs,
        "turns": [
            {field.name: _plain(getattr(turn, field.name)) for field in _TURN}
            for turn in trajectory.turns
        ],
        "weight_versions": list(trajectory.weight_versions),
    }
    if trajectory.routed_experts is not None:
        rows, present = trajectory.routed_experts.gather()
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
