"""A random policy on disk and samples of it with made rows."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from agent_rl.bench.trainer import bench_config
from agent_rl.config.schema import RunConfig
from agent_rl.model.random_policy import write_random_policy
from agent_rl.run.warmstart.train import TinyMoEShape
from agent_rl.types import TrainSample
from routing_cache import ArrayRows, RowLayout

SHAPE = TinyMoEShape(num_layers=2, num_experts=8, moe_top_k=2)
LAYOUT = RowLayout(num_hidden_layers=2, moe_layers=(0, 1), num_experts=8, moe_top_k=2)


def policy(folder: Path) -> Path:
    return write_random_policy(folder / "policy", shape=SHAPE)


def config(replay: Literal["off", "r3"] = "off") -> RunConfig:
    return bench_config(replay)


def samples(num: int = 3, seed: int = 0) -> list[TrainSample]:
    """Rows are drawn, so the live router agrees with few of them."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(num):
        length = 10 + 7 * number
        ids = rng.integers(6, 100, length, dtype=np.int32)
        rows = np.stack([rng.permuted(np.arange(8))[:2] for _ in range(2 * (length - 1))])
        mask = np.arange(length) >= 5
        made.append(
            TrainSample(
                sample_id=f"s{number}",
                token_ids=ids,
                loss_mask=mask,
                rollout_logprobs=np.full(length, -2.0, np.float32),
                advantages=mask.astype(np.float32),
                weight_versions=(0,),
                routed_experts=ArrayRows(LAYOUT, ids, rows.reshape(-1, 2, 2).astype(np.uint8)),
            )
        )
    return made
