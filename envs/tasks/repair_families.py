"""Families of small functions that the repair tasks are made from.

A family draws names and constants and returns a correct function with a one-line statement of
what it must do. Adding a family: write one function and add it to ``FAMILIES``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

Value = int | bool | list[int]

LIST_NAMES = ("xs", "seq", "vals", "nums", "data", "arr")
NUMBER_NAMES = ("x", "n", "p", "q", "w", "u")
RESULT_NAMES = ("t", "acc", "total", "res", "out", "s")
ITEM_NAMES = ("v", "e", "it", "k")
COMPARISONS = ((">", "above"), ("<", "below"), (">=", "at least"), ("<=", "at most"))


@dataclass(frozen=True)
class Specimen:
    """A correct function. ``body`` lines are relative to the function's indentation.

    ``semantics`` identifies what the function computes whatever its names are: it decides whether
    the task may be trained on or is held out.
    """

    name: str
    statement: str
    args: tuple[str, ...]
    body: tuple[str, ...]
    semantics: str
    draw_inputs: Callable[[random.Random], tuple[Value, ...]]


def _names(rng: random.Random, *pools: tuple[str, ...]) -> list[str]:
    chosen: list[str] = []
    for pool in pools:
        chosen.append(rng.choice([name for name in pool if name not in chosen]))
    return chosen


def _numbers(rng: random.Random, low: int, high: int, shortest: int, longest: int) -> list[int]:
    return [rng.randint(low, high) for _ in range(rng.randint(shortest, longest))]


def _near(rng: random.Random, centre: int) -> list[int]:
    """Draw values on both sides of a threshold, often exactly on it."""
    return [centre + rng.choice([-3, -1, 0, 0, 1, 2, 4]) for _ in range(rng.randint(2, 4))]


def affine(rng: random.Random) -> Specimen:
    x, y = _names(rng, NUMBER_NAMES, RESULT_NAMES)
    factor, offset = rng.randint(2, 9), rng.randint(1, 12)
    sign, word = rng.choice([("+", "plus"), ("-", "minus")])
    return Specimen(
        "affine",
        f"{x} times {factor} {word} {offset}",
        (x,),
        (f"{y} = {x} * {factor}", f"{y} = {y} {sign} {offset}", f"return {y}"),
        f"{factor} {sign} {offset}",
        lambda r: (r.randint(-3, 6),),
    )


def clamp(rng: random.Random) -> Specimen:
    (x,) = _names(rng, NUMBER_NAMES)
    low, high = rng.randint(0, 9), rng.randint(11, 20)
    edges = (low - 2, low - 1, low, low + 1, high - 1, high, high + 1, high + 3)
    return Specimen(
        "clamp",
        f"limit {x} to {low} and {high}",
        (x,),
        (
            f"if {x} < {low}:",
            f"    return {low}",
            f"if {x} > {high}:",
            f"    return {high}",
            f"return {x}",
        ),
        f"{low} {high}",
        lambda r: (r.choice(edges),),
    )


def total(rng: random.Random) -> Specimen:
    xs, t, v = _names(rng, LIST_NAMES, RESULT_NAMES, ITEM_NAMES)
    factor, start = rng.randint(2, 9), rng.randint(0, 9)
    return Specimen(
        "total",
        f"sum {xs} times {factor} from {start}",
        (xs,),
        (f"{t} = {start}", f"for {v} in {xs}:", f"    {t} += {v} * {factor}", f"return {t}"),
        f"{factor} {start}",
        lambda r: (_numbers(r, -2, 5, 2, 4),),
    )


def count(rng: random.Random) -> Specimen:
    xs, t, v = _names(rng, LIST_NAMES, RESULT_NAMES, ITEM_NAMES)
    bound, step = rng.randint(1, 20), rng.randint(1, 3)
    sign, word = rng.choice(COMPARISONS)
    return Specimen(
        "count",
        f"count {xs} {word} {bound} by {step}",
        (xs,),
        (
            f"{t} = 0",
            f"for {v} in {xs}:",
            f"    if {v} {sign} {bound}:",
            f"        {t} += {step}",
            f"return {t}",
        ),
        f"{sign} {bound} {step}",
        lambda r: (_near(r, bound),),
    )


def keep(rng: random.Random) -> Specimen:
    xs, t, v = _names(rng, LIST_NAMES, RESULT_NAMES, ITEM_NAMES)
    bound, offset = rng.randint(1, 20), rng.randint(1, 9)
    sign, word = rng.choice(COMPARISONS)
    return Specimen(
        "keep",
        f"keep {xs} {word} {bound} plus {offset}",
        (xs,),
        (
            f"{t} = []",
            f"for {v} in {xs}:",
            f"    if {v} {sign} {bound}:",
            f"        {t}.append({v} + {offset})",
            f"return {t}",
        ),
        f"{sign} {bound} {offset}",
        lambda r: (_near(r, bound),),
    )


def part(rng: random.Random) -> Specimen:
    xs, t = _names(rng, LIST_NAMES, RESULT_NAMES)
    cut, last = rng.randint(1, 3), rng.randint(1, 9)
    head = rng.random() < 0.5
    name, words = ("head", "first") if head else ("drop", "drop first")
    window = f"[:{cut}]" if head else f"[{cut}:]"
    return Specimen(
        name,
        f"{words} {cut} of {xs} then {last}",
        (xs,),
        (f"{t} = {xs}{window}", f"{t}.append({last})", f"return {t}"),
        f"{cut} {last}",
        lambda r: (_numbers(r, 0, 20, 4, 5),),
    )


def gap(rng: random.Random) -> Specimen:
    a, b, d = _names(rng, NUMBER_NAMES, NUMBER_NAMES, RESULT_NAMES)
    offset = rng.randint(1, 12)
    return Specimen(
        "gap",
        f"gap of {a} and {b} plus {offset}",
        (a, b),
        (f"{d} = {a} - {b}", f"if {d} < 0:", f"    {d} = 0 - {d}", f"return {d} + {offset}"),
        f"{offset}",
        lambda r: (r.randint(-5, 9), r.randint(-5, 9)),
    )


def pick(rng: random.Random) -> Specimen:
    a, b = _names(rng, NUMBER_NAMES, NUMBER_NAMES)
    offset = rng.randint(1, 12)
    name, sign = rng.choice([("larger", ">"), ("smaller", "<")])
    return Specimen(
        name,
        f"{name} of {a} and {b} plus {offset}",
        (a, b),
        (f"if {a} {sign} {b}:", f"    return {a} + {offset}", f"return {b} + {offset}"),
        f"{offset}",
        lambda r: (r.randint(-5, 9), r.randint(-5, 9)),
    )


def divides(rng: random.Random) -> Specimen:
    x, m = _names(rng, NUMBER_NAMES, RESULT_NAMES)
    factor, rest = rng.randint(2, 9), rng.randint(0, 1)
    return Specimen(
        "divides",
        f"rest of {x} by {factor} is {rest}",
        (x,),
        (f"{m} = {x} % {factor}", f"return {m} == {rest}"),
        f"{factor} {rest}",
        lambda r: (factor * r.randint(0, 3) + r.choice([0, 1, 1, 2, rest]),),
    )


def step(rng: random.Random) -> Specimen:
    (x,) = _names(rng, NUMBER_NAMES)
    bound, up, down = rng.randint(1, 20), rng.randint(1, 9), rng.randint(1, 9)
    sign, word = rng.choice(COMPARISONS)
    return Specimen(
        "step",
        f"if {x} {word} {bound} add {up} else drop {down}",
        (x,),
        (
            f"if {x} {sign} {bound}:",
            f"    {x} += {up}",
            "else:",
            f"    {x} -= {down}",
            f"return {x}",
        ),
        f"{sign} {bound} {up} {down}",
        lambda r: (bound + r.choice([-3, -1, 0, 1, 2]),),
    )


FAMILIES: tuple[Callable[[random.Random], Specimen], ...] = (
    affine,
    clamp,
    total,
    count,
    keep,
    part,
    gap,
    pick,
    divides,
    step,
)
