"""Agreement between the ranks: the same errors, the same numbers, on every one of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from agent_rl.errors import AgentRLError
from agent_rl.trainer import parallel
from agent_rl.trainer.routing_counts import RoutingCounts
from agent_rl.trainer.step_metrics import StepTotals, add_sums
from routing_cache import RoutingCacheError

# isort: split
from megatron.core import parallel_state

T = TypeVar("T")


def gather(value: T) -> list[T]:
    """Return ``value`` of every rank, in rank order. Collective over all ranks; pickles."""
    if dist.get_world_size() == 1:
        return [value]
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return [v for v in values if v is not None]


@contextlib.contextmanager
def failing_together() -> Iterator[None]:
    """Within: what one rank raises on purpose, all raise, so that none waits for it for ever.

    Collective at its end; the block itself must not be.
    """
    error: AgentRLError | RoutingCacheError | None = None
    try:
        yield
    except (AgentRLError, RoutingCacheError) as raised:
        error = raised
    errors = [e for (e,) in gather((error,)) if e is not None]
    if error is not None:
        raise error
    if errors:
        raise errors[0]


def all_true(condition: bool, device: torch.device) -> bool:
    """Tell whether ``condition`` holds on every rank. Collective over all ranks."""
    if dist.get_world_size() == 1:
        return condition
    flag = torch.tensor(int(condition), dtype=torch.int32, device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


def join_stages(counts: RoutingCounts, device: torch.device) -> RoutingCounts:
    """With a token's flips in any layer, whichever pipeline stage runs it. Collective over them.

    Every stage sees the same tokens, so afterwards they all have the same ``tokens_with_flip``.
    """
    pipeline: Any = parallel_state.get_pipeline_model_parallel_group()
    if pipeline.size() == 1:
        return counts
    flipped = counts.flipped.to(device=device, dtype=torch.uint8)
    dist.all_reduce(flipped, op=dist.ReduceOp.MAX, group=pipeline)
    joined = flipped.bool().cpu()
    return replace(counts, flipped=joined, tokens_with_flip=int(joined.sum()))


def reduce_totals(totals: StepTotals) -> None:
    """Make a step's totals those of all ranks, the same on each. Collective over all ranks."""
    if dist.get_world_size() == 1:
        return
    speaks = parallel.reports_outputs()
    totals.reduce(
        tokens=lambda sums: add_sums(gather(sums if speaks else {})),
        # Sequence parallelism splits the tokens over a tensor-parallel group, and a tensor-parallel
        # group without it trains no MoE: every rank's routers saw tokens of their own.
        routers=lambda sums: add_sums(gather(sums)),
        maxima=_largest,
    )


def _largest(maxima: dict[str, float]) -> dict[str, float]:
    every = gather(maxima)
    return {name: max(part[name] for part in every) for name in maxima}
