"""Plan for one engine reply: its checked rows, and which of them a session takes.

Pure functions over segments; :class:`~routing_cache.session.Session` carries out what they plan.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from routing_cache.digest import Digester, Digests
from routing_cache.disagreement import Comparison, compare_rows
from routing_cache.errors import RowCountError
from routing_cache.layout import Mask, RowLayout, Rows, TokenIds
from routing_cache.provenance import ConflictPolicy
from routing_cache.row_check import expected_rows, take_rows
from routing_cache.row_segments import Segment, clip_all, join_neighbours, true_runs


class Reply(NamedTuple):
    """A validated answer of the engine, bad rows already marked missing."""

    rows: Rows  # [R, L, K]
    digests: Digests | None  # [R]
    start: int  # absolute index of the first row
    prefill_end: int  # absolute index of the first decoded row
    weight_version: int
    turn: int
    num_bad: int
    num_missing: int  # marked by the engine, bad ones not counted

    @property
    def stop(self) -> int:
        return self.start + len(self.rows)

    @property
    def has_missing(self) -> bool:
        return self.num_bad + self.num_missing > 0

    def cut(self, start: int, stop: int) -> Rows:
        """Rows of tokens ``[start, stop)``, absolute indices."""
        return self.rows[start - self.start : stop - self.start]


class Piece(NamedTuple):
    """Rows ``[start, stop)`` that a session gains, from one source."""

    start: int
    stop: int
    shared: Segment | None  # take these rows of a sibling instead of the reply's
    publish: bool  # the reply's rows become what the tree knows for these tokens


def check_start(start: int, num_known: int) -> None:
    """Refuse a gap before ``start`` when ``num_known`` rows are known.

    Raises:
        RowCountError: see :meth:`Session.record`.
    """
    if not 0 <= start <= num_known:
        raise RowCountError(
            f"rows {num_known} to {start - 1} were never received"
            if start > 0
            else "start must not be negative",
            got=f"start={start}",
            expected=f"0 <= start <= num_rows={num_known}",
            fix="ask the engine for rows from session.num_rows on",
        )


class Found(NamedTuple):
    """A comparison of known rows with the reply's, for the disagreement counts."""

    comparison: Comparison
    start: int


def read_reply(
    rows: NDArray[np.integer],
    token_ids: TokenIds,
    layout: RowLayout,
    digester: Digester | None,
    *,
    start: int,
    num_prefill: int,
    weight_version: int,
    turn: int,
) -> Reply:
    """Check ``rows`` against ``token_ids``, the tokens from ``start`` to the session's end.

    Raises:
        LayoutError, RowCountError: see :meth:`Session.record`.
    """
    block = layout.canonical(rows)
    if len(block) != expected_rows(len(token_ids)):
        stop = start + expected_rows(len(token_ids))
        raise RowCountError(
            f"the reply's rows do not cover tokens [{start}, {stop}) of {stop + 1}",
            got=len(block),
            expected=stop - start,
            fix="state the start that the engine really used; never pad rows into shape",
        )
    # One more than there are rows where nothing was sampled: the prompt's last token has none.
    if not 0 <= num_prefill <= len(token_ids):
        raise RowCountError(
            "num_prefill counts the leading rows of this reply",
            got=num_prefill,
            expected=f"0 to {len(token_ids)}",
            fix="pass the prompt length minus start",
        )
    block, check = take_rows(block, layout)
    digests = None
    if digester is not None:
        digests = digester.rows(block, token_ids[:-1], start=start, weight_version=weight_version)
    return Reply(
        block,
        digests,
        start,
        start + num_prefill,
        weight_version,
        turn,
        check.num_bad,
        check.num_missing,
    )


def plan_overlap(
    reply: Reply, own: list[Segment], policy: ConflictPolicy, missing: int
) -> tuple[list[tuple[int, int]], list[Found]]:
    """Compare the reply with the session's ``own`` rows; returns ranges where the reply's win.

    A row that only one side knows wins over a missing one, whatever the policy.
    """
    runs = join_neighbours(clip_all(own, reply.start, reply.stop))
    if not runs:
        return [], []
    # One comparison, however many pieces earlier answers left: a call for each costs far more.
    start, stop = runs[0].start, runs[-1].stop
    stored = runs[0].rows if len(runs) == 1 else np.concatenate([run.rows for run in runs])
    comparison = compare_rows(stored, reply.cut(start, stop), missing)
    found = [Found(comparison, start)]
    if comparison.changed_rows is None:
        return [], found
    if policy == "first":
        wins = comparison.old_missing
    elif comparison.new_missing is None:
        wins = _bridge(comparison.changed_rows, ~comparison.changed_rows)
    else:
        wins = _bridge(comparison.changed_rows & ~comparison.new_missing, ~comparison.changed_rows)
    replaced = [] if wins is None else true_runs(wins)
    return [(start + a, start + b) for a, b in replaced], found


def plan_new(
    reply: Reply, known: list[Segment], start: int, policy: ConflictPolicy, missing: int
) -> tuple[list[Piece], list[Found]]:
    """Decide for rows from ``start`` on: share what a sibling brought, or store the reply's.

    ``known`` are the rows that other sessions of the same weight version put under the same
    tokens. Prompt rows are shared under ``first``, so that a group holds its prompt once. A
    decoded row is shared only when it is equal: the rows that produced this session's
    log-probabilities are the reply's.
    """
    pieces: list[Piece] = []
    comparisons: list[Found] = []
    position = start
    for segment in known:
        if position < segment.start:
            pieces.append(Piece(position, segment.start, None, True))
        for part in _cut_at(segment, reply.prefill_end):
            comparison = compare_rows(part.rows, reply.cut(part.start, part.stop), missing)
            comparisons.append(Found(comparison, part.start))
            is_prompt = part.start < reply.prefill_end
            for source, a, b in _sources(comparison, policy, len(part.rows), is_prompt=is_prompt):
                start, stop = part.start + a, part.start + b
                shared = part.clip(start, stop) if source == _SHARED else None
                pieces.append(Piece(start, stop, shared, source == _PUBLISHED))
        position = segment.stop
    if position < reply.stop:
        pieces.append(Piece(position, reply.stop, None, True))
    return pieces, comparisons


_SHARED, _PRIVATE, _PUBLISHED = 0, 1, 2


def _sources(
    comparison: Comparison, policy: ConflictPolicy, num_rows: int, *, is_prompt: bool
) -> list[tuple[int, int, int]]:
    """Return (source, start, stop) of runs of rows: a sibling's, or the reply's, published or not.

    Whatever the policy, a row that only one side knows comes from that side.
    """
    if comparison.identical:
        return [(_SHARED, 0, num_rows)]
    own = _PUBLISHED if policy == "latest" else _PRIVATE
    usual = _SHARED if is_prompt and policy == "first" else own
    if comparison.old_missing is None and comparison.new_missing is None:
        return [(usual, 0, num_rows)]
    source = np.full(num_rows, usual, np.int8)
    if comparison.old_missing is not None:
        source[comparison.old_missing] = _PUBLISHED
    if comparison.new_missing is not None:
        source[comparison.new_missing] = _SHARED
    edges = [0, *(np.flatnonzero(np.diff(source)) + 1).tolist(), num_rows]
    return [(int(source[a]), a, b) for a, b in pairwise(edges)]


_MAX_BRIDGED_ROWS = 64


def _bridge(wins: Mask, equal: Mask) -> Mask:
    """Fill short gaps of equal rows in ``wins``: many small segments cost more than copies."""
    bridged = wins.copy()
    for a, b in true_runs(equal & ~wins):
        if b - a <= _MAX_BRIDGED_ROWS and a > 0 and b < len(wins) and wins[a - 1] and wins[b]:
            bridged[a:b] = True
    return bridged


def _cut_at(segment: Segment, position: int) -> list[Segment]:
    if segment.start < position < segment.stop:
        return [segment.clip(segment.start, position), segment.clip(position, segment.stop)]
    return [segment]
