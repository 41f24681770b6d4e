"""One line of what ``agent-rl doctor`` found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "missing"]


@dataclass(frozen=True)
class Check:
    """One finding; ``advice`` says what to do about it."""

    name: str
    verdict: Verdict
    detail: str
    advice: str = ""


def gib(num_bytes: float) -> str:
    return f"{num_bytes / (1 << 30):,.1f} GiB"


def counted(number: int, noun: str, plural: str = "") -> str:
    """``1 GPU``, ``2 GPUs``; ``plural`` where it is not the noun with an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
