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
