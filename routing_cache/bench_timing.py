"""Timing of one thing against another.

The two run back to back inside one round, in an order that alternates from round to round, and are
timed in thread-CPU time; the figure is the median of the rounds' ratios, with its quartiles.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Figure:
    """One measured value, with quartiles where it is a timing."""

    value: float
    quartiles: tuple[float, float] | None = None


def thread_ns(function: Callable[[], object]) -> int:
    started = time.thread_time_ns()
    function()
    return time.thread_time_ns() - started


def paired(
    rounds: Iterator[tuple[Callable[[], object], Callable[[], object]]],
    *,
    inverse: bool = False,
    repeats: int = 1,
) -> Figure:
    """Median of first/second over rounds whose order alternates (``inverse``: second/first).

    The first one does its work ``repeats`` times, where once is too short for the clock.
    """
    ratios: list[float] = []
    for number, (first, second) in enumerate(rounds):
        if number % 2:
            other, own = thread_ns(second), thread_ns(first)
        else:
            own, other = thread_ns(first), thread_ns(second)
        own /= repeats
        ratios.append(other / own if inverse else own / other)
    return summary(ratios)


def summary(values: list[float]) -> Figure:
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    return Figure(float(middle), (float(low), float(high)))
