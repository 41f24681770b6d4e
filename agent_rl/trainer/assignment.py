"""Assignment of samples to micro-batches and data-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from agent_rl.config.schema import TrainerConfig
from agent_rl.trainer.grid import aligned

Plan = list[list[tuple[int, ...]]]  # by data-parallel rank: micro-batches of sample numbers


def needs_equal_shapes(config: TrainerConfig) -> bool:
    """Tell whether all micro-batches of a mini-batch must have one shape, on all ranks.

    The all-gather dispatcher joins the tokens of expert-parallel ranks in one tensor; stages of an
    interleaved pipeline cannot tell each other their shapes. Padding makes up the difference, so
    packed sequences cost least there.
    """
    gathers = config.token_dispatcher == "allgather"
    return gathers or config.virtual_pipeline > 1


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    token_budget: int,
    alignment: int = 1,
    num_ranks: int = 1,
    multiple_of: int = 1,
    packed: bool = False,
) -> Plan:
    """Assign samples to the micro-batches of every data-parallel rank.

    ``lengths`` are fed tokens. Samples are sorted by length so that little is padded, dealt to the
    ranks in turn, and joined while the padded (or packed) size stays within ``token_budget``; a
    sample longer than that gets a micro-batch of its own. Every rank gets the same number of
    micro-batches, a multiple of ``multiple_of``: where samples run out they are empty, so that all
    ranks take the same collective steps.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    plan = [
        _join(order[rank::num_ranks], lengths, token_budget, alignment, packed)
        for rank in range(num_ranks)
    ]
    count = max([1, *(len(batches) for batches in plan)])
    count = math.ceil(count / multiple_of) * multiple_of
    return [batches + [()] * (count - len(batches)) for batches in plan]


def _join(
    order: Sequence[int], lengths: Sequence[int], budget: int, alignment: int, packed: bool
) -> list[tuple[int, ...]]:
    batches: list[tuple[int, ...]] = []
    current: list[int] = []
    for i in order:  # longest first: the first one sets the padded width
        width = aligned(lengths[i if packed or not current else current[0]], alignment)
        taken = sum(aligned(lengths[j], alignment) for j in current)
        if current and (taken + width if packed else width * (len(current) + 1)) > budget:
            batches.append(tuple(current))
            current = []
        current.append(i)
    if current:
        batches.append(tuple(current))
    return batches
