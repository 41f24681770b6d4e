"""Outcomes of an instance: seven of them, which add up to what was asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """The end of one sample of one instance. All seven are in the denominator."""

    RESOLVED = "resolved"
    UNRESOLVED = "unresolved"
    EMPTY_PATCH = "empty_patch"
    DOES_NOT_APPLY = "does_not_apply"
    TIMEOUT = "timeout"  # the tests ran into the harness's time limit
    INFRASTRUCTURE = "infrastructure"  # image, daemon, endpoint: says nothing about the model
    NOT_RUN = "not_run"

    @property
    def label(self) -> str:
        return self.value.replace("_", " ")


@dataclass(frozen=True)
class Counts:
    """Number of times that each outcome occurred; ``total`` is what was asked for."""

    by_outcome: Mapping[Outcome, int]

    @classmethod
    def of(cls, outcomes: Iterable[Outcome]) -> Counts:
        found = list(outcomes)
        return cls({outcome: found.count(outcome) for outcome in Outcome})

    @property
    def total(self) -> int:
        return sum(self.by_outcome.values())

    @property
    def resolved(self) -> int:
        return self.by_outcome[Outcome.RESOLVED]
