"""Router disagreement: two answers for the same tokens, compared and counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from routing_cache.layout import Mask, Rows, expand_mask, missing_rows
from routing_cache.provenance import ROLES, Role


@dataclass(frozen=True)
class DisagreementCounts:
    """Router disagreement between two answers for the same tokens, in (token, layer) sets.

    ``by_layer`` counts along L. ``by_turn`` is keyed by the turn of the *later* answer.
    ``reordered`` sets hold the same experts in another order and are no disagreement.
    """

    compared: int
    differing: int
    reordered: int
    by_layer: tuple[int, ...]
    by_turn: dict[int, int]
    by_role: dict[Role, int]

    @property
    def fraction(self) -> float:
        """Share of the compared sets that differ."""
        return self.differing / self.compared if self.compared else 0.0


@dataclass
class DisagreementMeter:
    """Adds up what :func:`compare_rows` finds."""

    num_layers: int
    compared: int = 0
    differing: int = 0
    reordered: int = 0
    by_turn: Counter[int] = field(default_factory=Counter[int])
    by_role: Counter[Role] = field(default_factory=Counter[Role])

    def __post_init__(self) -> None:
        self.by_layer = np.zeros(self.num_layers, np.int64)

    def add(self, comparison: Comparison, turn: int, roles: NDArray[np.int8]) -> None:
        """Count one comparison; ``roles`` are the role codes of its tokens."""
        self.compared += comparison.num_sets
        self.reordered += comparison.num_reordered
        if comparison.differs is None:
            return
        total = int(np.count_nonzero(comparison.differs))
        self.differing += total
        self.by_layer += comparison.differs.sum(axis=0)
        self.by_turn[turn] += total
        per_token = comparison.differs.sum(axis=1)
        for code in np.unique(roles[per_token > 0]):
            self.by_role[ROLES[int(code)]] += int(per_token[roles == code].sum())

    def snapshot(self) -> DisagreementCounts:
        return DisagreementCounts(
            compared=self.compared,
            differing=self.differing,
            reordered=self.reordered,
            by_layer=tuple(int(n) for n in self.by_layer),
            by_turn=dict(self.by_turn),
            by_role=dict(self.by_role),
        )


@dataclass(frozen=True)
class Comparison:
    """Two answers for the same tokens, side by side."""

    num_sets: int  # (token, layer) sets where both answers are known
    num_reordered: int
    differs: NDArray[np.bool_] | None  # [T, L] other experts; None when nowhere
    changed_rows: Mask | None  # [T] rows not byte-equal, missing ones included
    old_missing: Mask | None  # [T] rows only the new answer knows
    new_missing: Mask | None  # [T] rows the new answer does not know

    @property
    def identical(self) -> bool:
        return self.changed_rows is None


def compare_rows(old: Rows, new: Rows, missing: int) -> Comparison:
    """Compare stored rows with a later answer, both ``[T, L, K]`` canonical."""
    neither = missing_rows(old, missing) & missing_rows(new, missing)
    num_sets = (len(old) - int(np.count_nonzero(neither))) * old.shape[1]
    changed = (old != new).any(axis=(1, 2))
    if not changed.any():
        return Comparison(num_sets, 0, None, None, None, None)
    where = np.flatnonzero(changed)
    old_part, new_part = old[where], new[where]
    old_missing, new_missing = missing_rows(old_part, missing), missing_rows(new_part, missing)
    both = ~(old_missing | new_missing)  # rows that changed are missing on one side at most
    unequal = (old_part != new_part).any(axis=2) & both[:, None]
    sets = (np.sort(old_part, axis=2) != np.sort(new_part, axis=2)).any(axis=2) & both[:, None]
    differs = np.zeros(old.shape[:2], np.bool_)
    differs[where] = sets
    return Comparison(
        num_sets=num_sets - int(np.count_nonzero(~both)) * old.shape[1],
        num_reordered=int(np.count_nonzero(unequal & ~sets)),
        differs=differs if sets.any() else None,
        changed_rows=changed,
        old_missing=expand_mask(old_missing, where, len(old)) if old_missing.any() else None,
        new_missing=expand_mask(new_missing, where, len(old)) if new_missing.any() else None,
    )
