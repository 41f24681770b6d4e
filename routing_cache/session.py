"""One conversation with an engine: its tokens, the rows known for them, its place in the tree."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from routing_cache.digest import Digests
from routing_cache.errors import ClosedError, RowCountError
from routing_cache.lease import RowsLease
from routing_cache.memory import Segment, Slab, SlabWriter, clip_all, overlay
from routing_cache.provenance import (
    Comparison,
    Kind,
    Provenance,
    RoleSpan,
    compare_rows,
    role_codes,
)
from routing_cache.radix_tree import TOKEN_BYTES, Position, common_prefix_bytes
from routing_cache.routed_experts import RowCheck, Rows, TokenIds, as_token_ids, check_rows
from routing_cache.row_index import RowIndex

if TYPE_CHECKING:
    from routing_cache.cache import RoutingCache


class _Reply(NamedTuple):
    """A validated answer of the engine, bad rows already marked missing."""

    rows: Rows  # [R, L, K]
    digests: Digests | None  # [R]
    start: int  # absolute index of the first row
    prefill_end: int  # absolute index of the first decoded row
    weight_version: int
    turn: int
    maybe_missing: bool

    def cut(self, start: int, stop: int) -> Rows:
        return self.rows[start - self.start : stop - self.start]

    def kind(self, position: int) -> Kind:
        return "prefill" if position < self.prefill_end else "decode"


class _Piece(NamedTuple):
    """Rows ``[start, stop)`` of a reply of one kind, and what is known for them already."""

    start: int
    stop: int
    kept: Segment | None  # take these rows instead of the reply's
    publish: bool  # whether the reply's rows become the tree's


class Session:
    """A conversation: append what the engine answers, lease the result to the trainer.

    Made by :meth:`RoutingCache.session` or :meth:`branch`. The rows are contiguous from token 0;
    one owner at a time may call the mutating methods.

    Example:
        >>> session = cache.session(weight_version=3)
        >>> session.adopt(prompt_ids)
        >>> reply = engine.generate(prompt_ids, routed_experts_start=session.num_rows)
        >>> session.record(reply.token_ids, reply.rows, start=reply.start, weight_version=3,
        ...                num_prefill=len(prompt_ids) - reply.start)
    """

    def __init__(self, cache: RoutingCache, weight_version: int, engine: str) -> None:
        self._cache = cache
        self.engine = engine
        self.weight_version = weight_version
        self._tokens = bytearray()  # int32
        self._segments: list[Segment] = []
        self._roles: list[RoleSpan] = []
        self._pinned: set[Slab] = set()
        self._writer = SlabWriter(cache.store)
        self._cursor: Position[RowIndex] | None = None
        self._cursor_version = weight_version
        self._closed = False

    @property
    def num_tokens(self) -> int:
        return len(self._tokens) // TOKEN_BYTES

    @property
    def num_rows(self) -> int:
        """Rows answered for from token 0 on: the next request's ``routed_experts_start``.

        Rows inside an answer that turned out bad or missing count, since asking again brings the
        same; an answer without any rows (``rows=None``) does not.
        """
        return self._segments[-1].stop if self._segments else 0

    @property
    def token_ids(self) -> TokenIds:
        """A copy of the session's tokens ``[T]``."""
        return np.frombuffer(bytes(self._tokens), np.int32)

    @property
    def token_bytes(self) -> int:
        """Bytes of the token buffer."""
        return len(self._tokens)

    def adopt(self, token_ids: object, *, weight_versions: Collection[int] | None = None) -> int:
        """Set the session's tokens to ``token_ids`` and take over the rows the tree knows.

        Tokens that extend the session are appended; when they leave it (history was rendered
        anew), the session forks at the true common prefix and keeps the rows before it. Returns
        ``num_rows``. Lookups see ``weight_versions``, by default only the session's own. Mutates.
        """
        with self._cache.exclusive():
            self._check_open()
            key = as_token_ids(token_ids).tobytes()
            common = common_prefix_bytes(key, 0, bytes(self._tokens)) // TOKEN_BYTES
            first_time = not self._tokens
            if common < self.num_tokens:
                self._truncate(common)
                self._cache.counters.forks += 1
            known = self.num_tokens
            self._tokens += key[known * TOKEN_BYTES :]
            if known < self.num_tokens:
                role = "prompt" if first_time else "tool"
                self._roles.append(RoleSpan(role, known, self.num_tokens))
            versions = {self.weight_version} if weight_versions is None else weight_versions
            before = self.num_rows
            found = self._cache.find_rows(key, versions, before)
            self._segments += found
            self._pin(found)
            self._cache.counters.rows_reused += self.num_rows - before
            self._cache.note_session(self)
            return self.num_rows

    def record(
        self,
        new_token_ids: object,
        rows: NDArray[np.integer] | None,
        *,
        start: int,
        weight_version: int,
        num_prefill: int,
        turn: int = 0,
        role_spans: Sequence[RoleSpan] = (),
    ) -> None:
        """Append ``new_token_ids`` and store the rows of one reply. Mutates.

        Args:
            new_token_ids: ``[N]`` tokens behind the session's: sampled ones, and the observation
                before them unless :meth:`adopt` brought it already.
            rows: ``[R, L or num_hidden_layers, K]`` any integer dtype, the rows of tokens
                ``[start, num_tokens-1)`` counted with the new tokens: the last sampled token was
                not fed yet, its row comes first in the next reply. None when the reply had none.
            start: absolute index of ``rows[0]``; at most :attr:`num_rows`. Rows before
                ``num_rows`` are checked against the stored ones under the conflict policy.
            weight_version: of the weights that computed the rows.
            num_prefill: how many leading rows of *this reply* belong to the prompt and were
                prefilled (prompt length minus ``start``); the others were decoded.
            turn: counts disagreements only.
            role_spans: whose tokens these are, absolute; by default derived from ``num_prefill``.

        Raises:
            RowCountError: a gap before ``start``, or too few or too many rows. Nothing changed.
            LayoutError: rows of another model. Nothing changed.
            BudgetError: no room. Nothing changed.
        """
        with self._cache.exclusive():
            self._check_open()
            new_key = as_token_ids(new_token_ids).tobytes()
            if rows is None:
                self._append_tokens(new_key, start + num_prefill, role_spans)
                self.weight_version = max(self.weight_version, weight_version)
                self._cache.counters.replies_without_rows += 1
                self._cache.note_session(self)
                return
            key = bytes(self._tokens) + new_key
            reply, check = self._read_reply(rows, key, start, num_prefill, weight_version, turn)
            self._store_reply(reply, check, key, new_key, role_spans)

    def branch(self, at: int) -> Session:
        """A new session with the first ``at`` tokens and their rows, shared. Mutates the cache."""
        with self._cache.exclusive():
            self._check_open()
            if not 0 <= at <= self.num_tokens:
                raise RowCountError(
                    "cannot branch outside the session", got=at, expected=f"0 to {self.num_tokens}"
                )
            twin = Session(self._cache, self.weight_version, self.engine)
            twin._tokens = self._tokens[: at * TOKEN_BYTES]
            twin._segments = clip_all(self._segments, 0, at)
            twin._roles = [r._replace(stop=min(r.stop, at)) for r in self._roles if r.start < at]
            twin._pin(twin._segments)
            self._cache.note_session(twin)
            return twin

    def lease(self) -> RowsLease:
        """The session's rows as they are now, pinned until released; O(segments), no copy."""
        self._check_open()
        tail = bytes(memoryview(self._tokens)[self.num_rows * TOKEN_BYTES :])
        return RowsLease(
            self._cache.layout,
            tuple(self._segments),
            tail,
            self.num_tokens,
            self._cache.digester,
            self._cache.store,
        )

    def close(self) -> None:
        """Forget the session; its rows stay in the tree until evicted. Idempotent. Mutates."""
        if self._closed:
            return
        self._closed = True
        self._writer.seal()
        self._cache.store.unpin(self._pinned)
        self._cache.forget_session(self)
        self._pinned, self._segments, self._cursor = set(), [], None
        self._tokens = bytearray()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What follows is the inside of record().

    def _read_reply(
        self,
        rows: NDArray[np.integer],
        key: bytes,
        start: int,
        num_prefill: int,
        weight_version: int,
        turn: int,
    ) -> tuple[_Reply, RowCheck]:
        end = len(key) // TOKEN_BYTES - 1
        block = self._cache.layout.canonical(rows)
        if not 0 <= start <= self.num_rows:
            raise RowCountError(
                f"rows {self.num_rows} to {start - 1} were never received"
                if start > 0
                else "start must not be negative",
                got=f"start={start}",
                expected=f"0 <= start <= num_rows={self.num_rows}",
                fix="ask the engine for rows from session.num_rows on",
            )
        if len(block) != end - start:
            raise RowCountError(
                f"the reply's rows do not cover tokens [{start}, {end}) of {end + 1}",
                got=len(block),
                expected=end - start,
                fix="state the start that the engine really used; never pad rows into shape",
            )
        if not 0 <= num_prefill <= len(block):
            raise RowCountError(
                "num_prefill counts the leading rows of this reply",
                got=num_prefill,
                expected=f"0 to {len(block)}",
                fix="pass the prompt length minus start",
            )
        check = check_rows(block, self._cache.layout)
        if check.bad is not None:
            block = block.copy()
            block[check.bad] = self._cache.layout.missing
        digests = None
        if self._cache.store.with_digests:
            ids = np.frombuffer(key, np.int32, len(block), start * TOKEN_BYTES)
            digests = self._cache.digester.rows(
                block, ids, start=start, weight_version=weight_version
            )
        maybe_missing = check.bad is not None or check.missing is not None
        reply = _Reply(
            block, digests, start, start + num_prefill, weight_version, turn, maybe_missing
        )
        return reply, check

    def _store_reply(
        self,
        reply: _Reply,
        check: RowCheck,
        key: bytes,
        new_key: bytes,
        role_spans: Sequence[RoleSpan],
    ) -> None:
        known, end = self.num_rows, reply.start + len(reply.rows)
        replaced, comparisons = self._plan_overlap(reply, min(known, end))
        pieces, found = self._plan_new(reply, key, max(known, reply.start), end)
        kept = [piece.kept for piece in pieces if piece.kept is not None]
        self._pin(kept)
        own = [p for p in pieces if p.kept is None]
        num_stored = sum(p.stop - p.start for p in own) + sum(b - a for a, b in replaced)
        self._cache.reserve(self._writer.bytes_needed(num_stored) + 2 * len(new_key))
        # Nothing was changed so far and nothing below can fail.
        self._append_tokens(new_key, reply.prefill_end, role_spans)
        for comparison, start in comparisons + found:
            self._count(comparison, start, reply.turn)
        for start, stop in replaced:
            segments = self._write(reply, start, stop, num_stored)
            num_stored -= stop - start
            self._segments = overlay(segments, self._segments)
            own += [_Piece(start, stop, None, True)]
        indexed: list[Segment] = [
            s for s in self._segments for a, b in replaced if a <= s.start and s.stop <= b
        ]
        for piece in pieces:
            if piece.kept is not None:
                self._segments.append(piece.kept)
                continue
            segments = self._write(reply, piece.start, piece.stop, num_stored)
            num_stored -= piece.stop - piece.start
            self._segments += segments
            if piece.publish:
                indexed += segments
        self.weight_version = reply.weight_version
        self._place(reply.weight_version, key, indexed)
        counters = self._cache.counters
        counters.rows_recorded += len(reply.rows)
        counters.rows_bad += check.num_bad
        counters.rows_missing += check.num_missing
        self._cache.note_session(self)

    def _plan_overlap(
        self, reply: _Reply, stop: int
    ) -> tuple[list[tuple[int, int]], list[tuple[Comparison, int]]]:
        """Compare the reply with the session's own rows; ranges where the reply's rows win."""
        replaced: list[tuple[int, int]] = []
        comparisons: list[tuple[Comparison, int]] = []
        for stored in clip_all(self._segments, reply.start, stop):
            comparison = compare_rows(
                stored.rows, reply.cut(stored.start, stored.stop), self._cache.layout.missing
            )
            comparisons.append((comparison, stored.start))
            if comparison.changed_rows is None:
                continue
            if self._cache.conflict_policy == "first":
                wins = comparison.old_missing
            else:
                wins = comparison.changed_rows
                if comparison.new_missing is not None:
                    wins = wins & ~comparison.new_missing
            if wins is not None:
                replaced += [(stored.start + a, stored.start + b) for a, b in true_runs(wins)]
        return replaced, comparisons

    def _plan_new(
        self, reply: _Reply, key: bytes, start: int, stop: int
    ) -> tuple[list[_Piece], list[tuple[Comparison, int]]]:
        """Decide for rows the session did not have: share a sibling's, or store the reply's.

        Prompt rows that a sibling brought before are shared, so that a group holds its prompt
        once. A decoded row is replaced by a sibling's only when they are equal: the rows that
        produced this session's log-probabilities are this reply's.
        """
        pieces: list[_Piece] = []
        comparisons: list[tuple[Comparison, int]] = []
        position = start
        latest = self._cache.conflict_policy == "latest"
        for known in self._known_to_tree(reply.weight_version, key, start, stop):
            pieces += self._fresh(reply, position, known.start)
            for part in _cut_at(known, reply.prefill_end):
                comparison = compare_rows(
                    part.rows, reply.cut(part.start, part.stop), self._cache.layout.missing
                )
                comparisons.append((comparison, part.start))
                prefill = reply.kind(part.start) == "prefill"
                fills = comparison.old_missing is not None and comparison.new_missing is None
                share = comparison.identical or (prefill and not latest and not fills)
                pieces.append(
                    _Piece(part.start, part.stop, part if share else None, latest or fills)
                )
            position = known.stop
        pieces += self._fresh(reply, position, stop)
        return pieces, comparisons

    def _fresh(self, reply: _Reply, start: int, stop: int) -> list[_Piece]:
        cuts = sorted({start, stop, min(max(reply.prefill_end, start), max(stop, start))})
        return [_Piece(a, b, None, True) for a, b in pairwise(cuts)]

    def _known_to_tree(self, version: int, key: bytes, start: int, stop: int) -> list[Segment]:
        """Rows ``[start, stop)`` that other sessions of ``version`` put under the same tokens."""
        tree = self._cache.tree(version)
        at = self._settled_cursor(version)
        if at is None:
            at = Position(tree.root, 0)
        node, matched = tree.walk(key, at, at.num_tokens * TOKEN_BYTES)
        stop = min(stop, matched)  # the walk may end inside an edge: the rest is another's
        segments: list[Segment] = []
        while node.parent is not None and node.end > start:
            segments = clip_all(node.payload.segments, start, stop) + segments
            node = node.parent
        return segments

    def _write(self, reply: _Reply, start: int, stop: int, more: int) -> list[Segment]:
        low, high = start - reply.start, stop - reply.start
        segments = self._writer.append(
            reply.rows[low:high],
            None if reply.digests is None else reply.digests[low:high],
            start=start,
            provenance=Provenance(self.engine, reply.weight_version, reply.kind(start)),
            has_missing=reply.maybe_missing,
            more_rows=more - (stop - start),
        )
        self._pin(segments)
        return segments

    def _place(self, version: int, key: bytes, segments: list[Segment]) -> None:
        """Put the session's tokens into the version's tree and ``segments`` under them."""
        tree = self._cache.tree(version)
        at = self._settled_cursor(version) or Position(tree.root, 0)
        position = tree.insert(key, at, at.num_tokens * TOKEN_BYTES)
        self._cursor, self._cursor_version = position, version
        node = position.node
        first = min((s.start for s in segments), default=position.num_tokens)
        while node.parent is not None and node.end > first:
            for segment in segments:
                if segment.start < node.end and segment.stop > node.start:
                    node.payload.put(segment.clip(node.start, node.end))
            node = node.parent
        self._cache.lru.touch(position.node)

    def _settled_cursor(self, version: int) -> Position[RowIndex] | None:
        if self._cursor is None or self._cursor_version != version:
            return None
        tree = self._cache.tree(version)
        self._cursor = tree.settle(self._cursor)
        return self._cursor

    def _append_tokens(
        self, new_key: bytes, prompt_end: int, role_spans: Sequence[RoleSpan]
    ) -> None:
        known = self.num_tokens
        self._tokens += new_key
        stop = self.num_tokens
        middle = min(max(known, prompt_end), stop)
        if known < middle:
            self._roles.append(RoleSpan("tool" if known else "prompt", known, middle))
        if middle < stop:
            self._roles.append(RoleSpan("assistant", middle, stop))
        self._roles += role_spans

    def _truncate(self, num_tokens: int) -> None:
        del self._tokens[num_tokens * TOKEN_BYTES :]
        self._segments = clip_all(self._segments, 0, num_tokens)
        self._roles = [
            r._replace(stop=min(r.stop, num_tokens)) for r in self._roles if r.start < num_tokens
        ]
        self._cursor = None

    def _count(self, comparison: Comparison, start: int, turn: int) -> None:
        differs = comparison.differs
        length = 0 if differs is None else len(differs)
        roles = role_codes(self._roles, start, start + length)
        self._cache.disagreements.add(comparison, turn, roles)

    def _pin(self, segments: Sequence[Segment]) -> None:
        new = {s.slab for s in segments} - self._pinned
        if new:
            self._cache.store.pin(new)
            self._pinned |= new

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this session was closed", fix="lease() before close()")


def _cut_at(segment: Segment, position: int) -> list[Segment]:
    if segment.start < position < segment.stop:
        return [segment.clip(segment.start, position), segment.clip(position, segment.stop)]
    return [segment]


def true_runs(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """``[start, stop)`` of every run of True in ``mask``."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
