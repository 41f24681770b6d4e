"""What a red-team attempt came to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Attempt:
    """One way tried on one sandbox. ``noticed`` is what the score reports about it."""

    sandbox: str
    name: str
    reward: float | None
    reason: str
    noticed: tuple[str, ...] = ()
