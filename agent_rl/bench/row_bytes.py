"""Bytes of routing rows that a trainer holds: exact sizes of its tables, and a traced peak.

Unique bytes are one byte per id for every (fed token, MoE layer of the rank) of the samples that
the rank trains: what would remain if nothing were padded, widened or copied.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agent_rl.trainer.assignment import plan_micro_batches
from agent_rl.trainer.batch import fed_tokens, lay_out
from agent_rl.types import TrainSample
from routing_cache import ArrayRows, RowLayout

ALIGNMENT = 8  # the trainer's, without context or sequence parallelism
LARGE = RowLayout(
    num_hidden_layers=48, moe_layers=tuple(range(48)), num_experts=128, moe_top_k=8
)  # Qwen3-30B-A3B


@dataclass(frozen=True)
class RowBytes:
    """Sizes for a group-sized step of a 48-layer model, and for one very long sample."""

    routing_bytes_over_unique: float  # padded micro-batches
    routing_bytes_over_unique_packed: float  # the same samples packed
    long_sample_tokens: int
    long_sample_unique_bytes: int
    long_sample_peak_bytes: int  # allocated at one time while the sample is laid out, all layers
    long_sample_peak_over_unique: float
    long_sample_held_bytes: int  # allocated once it is laid out
    long_sample_stage_peak_bytes: int  # the same on one of four pipeline stages
    long_sample_stage_peak_over_unique: float  # … over the unique bytes of the stage's layers


def measure_row_bytes(
    *, num_samples: int = 64, long_tokens: int = 38_000, seed: int = 0
) -> RowBytes:
    """Lay out :func:`large_samples` and a very long one; no model is needed."""
    samples = large_samples(num_samples, seed)
    long = _sample(np.random.default_rng(seed + 1), long_tokens, LARGE)
    stage = range(12)  # of 4 pipeline stages
    unique = fed_tokens(long) * LARGE.row_bytes
    peak, held = _traced(long, range(48))
    stage_peak, _ = _traced(long, stage)
    stage_unique = fed_tokens(long) * len(stage) * LARGE.moe_top_k
    return RowBytes(
        routing_bytes_over_unique=_over_unique(samples, packed=False),
        routing_bytes_over_unique_packed=_over_unique(samples, packed=True),
        long_sample_tokens=long_tokens,
        long_sample_unique_bytes=unique,
        long_sample_peak_bytes=peak,
        long_sample_peak_over_unique=peak / unique,
        long_sample_held_bytes=held,
        long_sample_stage_peak_bytes=stage_peak,
        long_sample_stage_peak_over_unique=stage_peak / stage_unique,
    )


def large_samples(num_samples: int, seed: int = 0) -> list[TrainSample]:
    """Make samples of a large model's layout, of the lengths of a step.

    Lengths are log-normal, 300 to 8,000 tokens, half of them below 2,000.
    """
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(7.6, 0.5, num_samples), 300, 8_000).astype(int)
    return [_sample(rng, int(n), LARGE) for n in lengths]


def _over_unique(samples: Sequence[TrainSample], *, packed: bool) -> float:
    """Return the bytes of all tables of a step, masks included, over the unique bytes."""
    plan = plan_micro_batches(
        [fed_tokens(s) for s in samples], token_budget=8_192, alignment=ALIGNMENT, packed=packed
    )[0]
    held = 0
    for index, chosen in enumerate(plan):
        table = lay_out(
            samples, chosen, index=index, layout=LARGE, packed=packed, alignment=ALIGNMENT
        ).table(replay=True)
        held += sum(t.nbytes for t in (table.rows, table.present, table.padding))
    return held / sum(fed_tokens(s) * LARGE.row_bytes for s in samples)


def _traced(sample: TrainSample, layers: Sequence[int]) -> tuple[int, int]:
    """Return peak and remaining bytes of laying one sample out, with the whole micro-batch."""
    tracemalloc.start()
    try:
        batch = lay_out([sample], [0], index=0, layout=LARGE, layers=layers, alignment=ALIGNMENT)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert batch.num_tokens == fed_tokens(sample)
    return peak, held


def _sample(rng: np.random.Generator, num_tokens: int, layout: RowLayout) -> TrainSample:
    """Make a sample with a third of its tokens trained and random sets of distinct experts."""
    ids = rng.integers(0, 1000, num_tokens, dtype=np.int32)
    shape = (num_tokens - 1, layout.num_moe_layers, 1)
    first = rng.integers(0, layout.num_experts, shape, dtype=np.uint8)
    stride = 2 * rng.integers(0, layout.num_experts // 2, shape, dtype=np.uint8) + np.uint8(1)
    # Both wrap at 256, a multiple of the number of experts; an odd stride repeats none of them.
    rows = (first + stride * np.arange(layout.moe_top_k, dtype=np.uint8)) % layout.num_experts
    mask = rng.random(num_tokens) < 1 / 3
    return TrainSample(
        sample_id=f"made-{num_tokens}",
        token_ids=ids,
        loss_mask=mask,
        rollout_logprobs=np.zeros(num_tokens, np.float32),
        advantages=mask.astype(np.float32),
        weight_versions=(0,),
        routed_experts=ArrayRows(layout, ids, rows.astype(layout.dtype)),
    )
