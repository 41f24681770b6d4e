"""Rows that came again: of the same tokens, or of others.

A number of rows only says how many came. Whose they are shows in the experts: an engine that
reused a token's KV returns its row as it was; one that computed the token anew, or kept a
sibling's copy of it, may flip an expert here and there; rows of other tokens share about
``moe_top_k / num_experts`` of their experts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from routing_cache.layout import RowLayout, Rows, missing_rows
from routing_cache.row_check import check_rows

MIN_SHARED = 0.75
MIN_SHARED_ONE_ROW = 0.5  # of a single row that was computed anew: few ids, so more noise


class Agreement(NamedTuple):
    """Outcome of :func:`compare_again`."""

    num_compared: int  # rows that both sides know
    shared: float  # share of their known experts that came again; 1 where nothing was compared
    of_same_tokens: bool


def compare_again(
    known: Rows, again: NDArray[np.integer], layout: RowLayout, *, reused: bool = False
) -> Agreement:
    """Tell whether rows that came again are of the same tokens, under the same weights.

    Rows that are missing on either side, or bad, say nothing and are left out.

    Args:
        known: ``[T, L, K]`` canonical, missing rows marked.
        again: ``[T, L or num_hidden_layers, K]`` as the engine returned them.
        reused: the engine says that it computed none of these tokens anew.

    Raises:
        LayoutError: ``again`` is of another model.
    """
    came = layout.canonical(again)
    check = check_rows(came, layout)
    silent = missing_rows(known, layout.missing)
    for mask in (check.bad, check.missing):
        if mask is not None:
            silent = silent | mask
    known, came = known[~silent], came[~silent]
    if not len(known):
        return Agreement(0, 1.0, True)
    shared = float((came[:, :, :, None] == known[:, :, None, :]).any(axis=3).mean())
    least = MIN_SHARED_ONE_ROW if len(known) == 1 and not reused else MIN_SHARED
    return Agreement(len(known), shared, shared >= least)
