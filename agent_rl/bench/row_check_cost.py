"""Time of checking the rows of a step: in the trainer's layout, over a bare ``check_rows``."""

from __future__ import annotations

import time
from collections.abc import Callable

from agent_rl.bench.row_bytes import LARGE, large_samples
from agent_rl.trainer.batch import fed_tokens, refuse_damage
from routing_cache import check_rows

_PASSES = 5  # over all samples, timed together: one takes milliseconds


def measure_row_check(num_rounds: int, num_samples: int = 64) -> tuple[list[float], list[float]]:
    """Return the CPU seconds of every round, in the layout and bare, for the rows of one step.

    Both check the same arrays, as gathered from the samples of a 48-layer model.
    """
    samples = large_samples(num_samples)
    gathered = [
        sample.routed_experts.gather(stop=fed_tokens(sample))
        for sample in samples
        if sample.routed_experts is not None
    ]
    every = range(LARGE.num_moe_layers)

    def in_layout() -> None:
        for sample, (rows, present) in zip(samples, gathered, strict=True):
            refuse_damage(sample, rows, present, LARGE, start=0, slots=every)

    def bare() -> None:
        for rows, _ in gathered:
            assert check_rows(rows, LARGE).all_good

    above: list[float] = []
    below: list[float] = []
    for number in range(num_rounds + 1):
        pairs = [(in_layout, above), (bare, below)]
        for check, seconds in pairs[:: 1 if number % 2 else -1]:
            seconds.append(_cpu_seconds(check))
    return above[1:], below[1:]  # the first round warms up


def _cpu_seconds(check: Callable[[], None]) -> float:
    started = time.process_time()
    for _ in range(_PASSES):
        check()
    return time.process_time() - started
