"""One line of what ``agent-rl doctor`` found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from agent_rl.config.rules.fault import Fault

Verdict = Literal["ok", "warning", "missing"]


@dataclass(frozen=True)
class Check:
    """One finding; ``advice`` says what to do about it."""

    name: str
    verdict: Verdict
    detail: str
    advice: str = ""


def refused_first(faults: Iterable[Fault], checks: Iterable[Check]) -> Iterator[Check]:
    """Show broken rules in their own words, the end of which is the advice; then ``checks``.

    A check that has the name of a refused key would only say the same again: it is left out.
    """
    refused: set[str] = set()
    for key, text in faults:
        refused.add(key)
        detail, semicolon, advice = text.rpartition("; ")
        yield Check(key, "missing", *((detail, advice) if semicolon else (text, f"change {key}")))
    yield from (check for check in checks if check.name not in refused)


def gib(num_bytes: float) -> str:
    return f"{num_bytes / (1 << 30):,.1f} GiB"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Write ``1 GPU``, ``2 GPUs``; ``plural`` where it is not the noun with an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
