"""One conversation with an engine: its tokens, the rows known for them, its place in the tree."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from routing_cache.core import CacheCore
from routing_cache.disagreement import Comparison
from routing_cache.errors import BudgetError, ClosedError, RowCountError
from routing_cache.layout import TokenIds, as_token_ids
from routing_cache.lease import RowsLease
from routing_cache.provenance import Provenance, RoleSpan, check_roles, role_code
from routing_cache.radix_tree import (
    NODE_BYTES,
    TOKEN_BYTES,
    Position,
    RadixTree,
    common_prefix_bytes,
)
from routing_cache.reply_plan import Found, Reply, check_start, plan_new, plan_overlap, read_reply
from routing_cache.row_index import RowIndex
from routing_cache.row_segments import Segment, Slab, clip_all, overlay
from routing_cache.row_store import SlabWriter


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

    def __init__(self, core: CacheCore, weight_version: int, engine: str) -> None:
        self._core = core
        self.engine = engine
        self.weight_version = weight_version
        self._tokens = bytearray()  # int32
        self._segments: list[Segment] = []
        self._roles = bytearray()  # one role code per token
        self._pinned: set[Slab] = set()
        self._writer = SlabWriter(core.store)
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
        """Bytes of the token buffer, one per token for its role included."""
        return len(self._tokens) + len(self._roles)

    def adopt(self, token_ids: object, *, weight_versions: Collection[int] | None = None) -> int:
        """Set the session's tokens to ``token_ids`` and take over the rows the tree knows.

        Tokens that extend the session are appended; when they leave it (history was rendered
        anew), the session forks at the true common prefix and keeps the rows before it. Returns
        ``num_rows``. Lookups see ``weight_versions``, by default only the session's own. Mutates.

        Raises:
            LayoutError: no vector of int32 token ids. Nothing changed.
            BudgetError: no room for the tokens. Nothing changed.
        """
        with self._core.guard:
            self._check_open()
            key = as_token_ids(token_ids).tobytes()
            common = common_prefix_bytes(key, 0, bytes(self._tokens)) // TOKEN_BYTES
            first_time = not self._tokens
            added = len(key) // TOKEN_BYTES - self.num_tokens
            self._core.reserve(max(0, added) * (TOKEN_BYTES + 1))
            if common < self.num_tokens:
                self._truncate(common)
                self._core.counters.forks += 1
            known = self.num_tokens
            self._tokens += key[known * TOKEN_BYTES :]
            role = role_code("prompt" if first_time else "tool")
            self._roles += bytes([role]) * (self.num_tokens - known)
            versions = {self.weight_version} if weight_versions is None else weight_versions
            before = self.num_rows
            found = self._core.find_rows(key, versions, before)
            self._segments += found
            self._pin(found)
            self._core.counters.rows_reused += self.num_rows - before
            self._core.bill(self, self.token_bytes)
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
            RowCountError: a gap before ``start``, too few or too many rows, or impossible
                ``role_spans``. Nothing changed.
            LayoutError: rows of another model. Nothing changed.
            BudgetError: no room. Nothing changed.
        """
        with self._core.guard:
            self._check_open()
            new_key = as_token_ids(new_token_ids).tobytes()
            check_roles(role_spans, self.num_tokens + len(new_key) // TOKEN_BYTES)
            if rows is None:
                self._core.reserve(_buffer_bytes(new_key))
                self._append_tokens(new_key, start + num_prefill, role_spans)
                self.weight_version = max(self.weight_version, weight_version)
                self._core.counters.replies_without_rows += 1
                self._core.bill(self, self.token_bytes)
                return
            check_start(start, self.num_rows)
            ids = np.frombuffer(bytes(self._tokens[start * TOKEN_BYTES :]) + new_key, np.int32)
            reply = read_reply(
                rows,
                ids,
                self._core.layout,
                self._core.digester if self._core.store.with_digests else None,
                start=start,
                num_prefill=num_prefill,
                weight_version=weight_version,
                turn=turn,
            )
            self._store(reply, new_key, role_spans)

    def branch(self, at: int) -> Session:
        """Begin a session that shares the first ``at`` tokens and their rows. Mutates the cache.

        Raises:
            RowCountError: ``at`` lies outside the session.
            BudgetError: no room for a copy of the tokens.
        """
        with self._core.guard:
            self._check_open()
            if not 0 <= at <= self.num_tokens:
                raise RowCountError(
                    "cannot branch outside the session", got=at, expected=f"0 to {self.num_tokens}"
                )
            self._core.reserve(at * (TOKEN_BYTES + 1))
            twin = Session(self._core, self.weight_version, self.engine)
            twin._tokens = self._tokens[: at * TOKEN_BYTES]
            twin._segments = clip_all(self._segments, 0, at)
            twin._roles = self._roles[:at]
            twin._pin(twin._segments)
            self._core.bill(twin, twin.token_bytes)
            return twin

    def lease(self) -> RowsLease:
        """Pin the session's rows as they are now until released; O(segments), no copy."""
        self._check_open()
        tail = bytes(memoryview(self._tokens)[self.num_rows * TOKEN_BYTES :])
        return RowsLease(
            self._core, tuple(self._segments), tail, self.num_tokens, set(self._pinned)
        )

    def close(self) -> None:
        """Forget the session; its rows stay in the tree until evicted. Idempotent. Mutates."""
        if self._closed:
            return
        self._closed = True
        self._writer.seal()
        self._core.store.unpin(self._pinned)
        self._core.forget(self)
        self._pinned, self._segments, self._cursor = set(), [], None
        self._tokens, self._roles = bytearray(), bytearray()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What follows carries out record().

    def _store(self, reply: Reply, new_key: bytes, role_spans: Sequence[RoleSpan]) -> None:
        core = self._core
        policy, missing = core.conflict_policy, core.layout.missing
        start = max(self.num_rows, reply.start)
        replaced, overlap = list[tuple[int, int]](), list[Found]()
        if reply.start < start:
            replaced, overlap = plan_overlap(reply, self._segments, policy, missing)
        known = self._known_to_tree(reply.weight_version, new_key, start, reply.stop)
        pieces, found = plan_new(reply, known, start, policy, missing)
        self._pin([p.shared for p in pieces if p.shared is not None])
        num_own = sum(p.stop - p.start for p in pieces if p.shared is None)
        num_own += sum(b - a for a, b in replaced)
        self._reserve(reply.weight_version, num_own, new_key)
        # Nothing was changed so far, and nothing below can be refused.
        self._append_tokens(new_key, reply.prefill_end, role_spans)
        for comparison, at in overlap + found:
            self._count(comparison, at, reply.turn)
        indexed: list[Segment] = []
        for a, b in replaced:
            indexed += self._write(reply, a, b, num_own)
            num_own -= b - a
        if indexed:
            self._segments = overlay(indexed, self._segments)
        for piece in pieces:
            if piece.shared is not None:
                self._segments.append(piece.shared)
                continue
            segments = self._write(reply, piece.start, piece.stop, num_own)
            num_own -= piece.stop - piece.start
            self._segments += segments
            if piece.publish:
                indexed += segments
        if replaced:
            self._unpin_unused()
        self.weight_version = reply.weight_version
        self._place(reply.weight_version, indexed)
        core.counters.rows_recorded += len(reply.rows)
        core.counters.rows_bad += reply.num_bad
        core.counters.rows_missing += reply.num_missing
        core.bill(self, self.token_bytes)

    def _reserve(self, version: int, num_own: int, new_key: bytes) -> None:
        """Make room for the rows to be written, the new tokens, and the tree's growth."""
        if self._core.store.budget_bytes is None:
            return
        held = self._writer.bytes_needed(num_own) + _buffer_bytes(new_key)
        in_tree = -1
        try:
            while True:
                tree, at = self._tree_at(version)
                suffix = bytes(self._tokens[at.num_tokens * TOKEN_BYTES :]) + new_key
                matched = tree.walk(suffix, at).num_tokens
                if matched == in_tree:
                    return
                # Making room can evict what was matched: ask again until nothing changes.
                in_tree = matched
                edge = len(suffix) - (matched - at.num_tokens) * TOKEN_BYTES
                self._core.reserve(held + edge + 2 * NODE_BYTES)
        except BudgetError:
            self._unpin_unused()
            raise

    def _known_to_tree(self, version: int, new_key: bytes, start: int, stop: int) -> list[Segment]:
        """Find rows ``[start, stop)`` that other sessions of ``version`` put under these tokens."""
        tree, at = self._tree_at(version)
        suffix = bytes(self._tokens[at.num_tokens * TOKEN_BYTES :]) + new_key
        node, num_tokens = tree.walk(suffix, at)
        # Beyond the match the node's rows are those of other tokens.
        stop = min(stop, num_tokens)
        segments: list[Segment] = []
        while node.parent is not None and node.end > start:
            segments = clip_all(node.payload.segments, start, stop) + segments
            node = node.parent
        return segments

    def _write(self, reply: Reply, start: int, stop: int, num_own: int) -> list[Segment]:
        """Copy the reply's rows ``[start, stop)``; ``num_own`` rows in all are to be copied."""
        low, high = start - reply.start, stop - reply.start
        segments = self._writer.append(
            reply.rows[low:high],
            None if reply.digests is None else reply.digests[low:high],
            start=start,
            provenance=Provenance(self.engine, reply.weight_version, "decode"),
            has_missing=reply.has_missing,
            more_rows=num_own - (stop - start),
        )
        self._pin(segments)
        middle = reply.prefill_end
        if start >= middle:
            return segments
        prefill = Provenance(self.engine, reply.weight_version, "prefill")
        first = [
            Segment(s.start, s.stop, s.slab, s.offset, prefill, s.has_missing)
            for s in clip_all(segments, start, middle)
        ]
        return first + clip_all(segments, middle, stop)

    def _place(self, version: int, segments: list[Segment]) -> None:
        """Put the session's tokens into the version's tree and ``segments`` under them."""
        tree, at = self._tree_at(version)
        position = tree.insert(bytes(self._tokens[at.num_tokens * TOKEN_BYTES :]), at)
        self._cursor, self._cursor_version = position, version
        node = position.node
        first = min((s.start for s in segments), default=position.num_tokens)
        while node.parent is not None and node.end > first:
            part = clip_all(segments, node.start, node.end)
            node.payload.put(part, self._core.conflict_policy, self._core.layout.missing)
            self._core.lru.enqueue(node)
            node = node.parent
        self._core.lru.touch(position.node)

    def _tree_at(self, version: int) -> tuple[RadixTree[RowIndex], Position[RowIndex]]:
        """Return the version's tree and how far into it the session is known to have come."""
        tree = self._core.tree(version)
        at = None
        if self._cursor is not None and self._cursor_version == version:
            at = tree.settle(self._cursor)
        return tree, at or Position(tree.root, 0)

    def _append_tokens(
        self, new_key: bytes, prompt_end: int, role_spans: Sequence[RoleSpan]
    ) -> None:
        known = self.num_tokens
        self._tokens += new_key
        stop = self.num_tokens
        middle = min(max(known, prompt_end), stop)
        prompt = role_code("tool" if known else "prompt")
        self._roles += bytes([prompt]) * (middle - known)
        self._roles += bytes([role_code("assistant")]) * (stop - middle)
        for role, low, high in role_spans:
            self._roles[low:high] = bytes([role_code(role)]) * (high - low)

    def _truncate(self, num_tokens: int) -> None:
        del self._tokens[num_tokens * TOKEN_BYTES :]
        self._segments = clip_all(self._segments, 0, num_tokens)
        self._unpin_unused()
        del self._roles[num_tokens:]
        self._cursor = None

    def _count(self, comparison: Comparison, start: int, turn: int) -> None:
        differs = comparison.differs
        stop = start if differs is None else start + len(differs)
        roles = np.frombuffer(bytes(self._roles[start:stop]), np.int8)
        self._core.disagreements.add(comparison, turn, roles)

    def _pin(self, segments: Sequence[Segment]) -> None:
        new = {s.slab for s in segments} - self._pinned
        if new:
            self._core.store.pin(new)
            self._pinned |= new

    def _unpin_unused(self) -> None:
        """Give back pins of segments that went: leases pin what the session pins."""
        unused = self._pinned - {s.slab for s in self._segments}
        self._core.store.unpin(unused)
        self._pinned -= unused

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this session was closed", fix="lease() before close()")


def _buffer_bytes(key: bytes) -> int:
    """Count the bytes that a session holds for these tokens: their ids and roles."""
    return len(key) // TOKEN_BYTES * (TOKEN_BYTES + 1)
