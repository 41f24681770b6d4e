"""Contents that the cache must have, as dictionaries: one entry per token of every prefix.

A prefix is the bytes of its int32 token ids, a row the bytes of its ids ``[L, K]``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from cache_truth import LAYOUT, key_of

from routing_cache import RoutingCache
from routing_cache.radix_tree import TOKEN_BYTES

NUM_LAYERS, TOP_K = LAYOUT.num_moe_layers, LAYOUT.moe_top_k
MISSING = bytes([LAYOUT.missing]) * LAYOUT.row_bytes
Tree = dict[bytes, bytes | None]  # prefix -> the row of its last token; None: no answer so far


def prefix(tokens: bytes, p: int) -> bytes:
    """Tokens 0 to p."""
    return tokens[: (p + 1) * TOKEN_BYTES]


def snapshot(cache: RoutingCache) -> dict[int, Tree]:
    """Contents of the cache's trees."""
    found: dict[int, Tree] = {}
    for version, tree in cache.core.trees.items():
        entries: Tree = {}
        for node in tree.nodes():
            key = key_of(node)
            entries |= {prefix(key, p): None for p in range(node.start, node.end)}
            for segment in node.payload.segments:
                block, size = segment.rows.tobytes(), LAYOUT.row_bytes
                for index, p in enumerate(range(segment.start, segment.stop)):
                    entries[prefix(key, p)] = block[index * size : (index + 1) * size]
        if entries:
            found[version] = entries
    return found


@dataclass
class ModelSession:
    """A conversation: its tokens, whose they are, and (weight version, row) of each row."""

    version: int
    tokens: bytes = b""
    roles: list[str] = field(default_factory=list)
    rows: list[tuple[int, bytes]] = field(default_factory=list)
    turn: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


@dataclass(frozen=True)
class ModelReply:
    """Rows as they must be after the check: bad ones missing."""

    rows: list[bytes]
    start: int
    num_prefill: int
    version: int
    num_bad: int
    num_missing: int


@dataclass
class Counts:
    """The counters that the model can tell."""

    rows_recorded: int = 0
    rows_reused: int = 0
    rows_bad: int = 0
    rows_missing: int = 0
    replies_without_rows: int = 0
    forks: int = 0


@dataclass
class Disagreements:
    """Sets compared, by hand."""

    compared: int = 0
    differing: int = 0
    reordered: int = 0
    by_layer: list[int] = field(default_factory=lambda: [0] * NUM_LAYERS)
    by_turn: dict[int, int] = field(default_factory=dict)
    by_role: dict[str, int] = field(default_factory=dict)

    def compare(self, old: bytes, new: bytes, turn: int, role: str) -> None:
        if MISSING in (old, new):
            return
        for layer in range(NUM_LAYERS):
            ids = slice(layer * TOP_K, (layer + 1) * TOP_K)
            self.compared += 1
            if old[ids] == new[ids]:
                continue
            if sorted(old[ids]) == sorted(new[ids]):
                self.reordered += 1
                continue
            self.differing += 1
            self.by_layer[layer] += 1
            self.by_turn[turn] = self.by_turn.get(turn, 0) + 1
            self.by_role[role] = self.by_role.get(role, 0) + 1


@dataclass
class DictionaryCache:
    """The operations of ``RoutingCache`` and ``Session`` on plain dictionaries."""

    policy: str
    trees: dict[int, Tree] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    disagreements: Disagreements = field(default_factory=Disagreements)
    # Rows of the last reply that stand where an eviction in mid-call removed the row in ``trees``.
    after_eviction: dict[tuple[int, bytes], bytes] = field(default_factory=dict)

    def lookup(
        self, tokens: bytes, versions: Collection[int]
    ) -> tuple[int, list[tuple[int, bytes]]]:
        """Tokens matched under any version, and the rows known for them without a gap."""
        num_tokens, rows = 0, []
        order = sorted(versions, reverse=self.policy == "latest")
        for p in range(len(tokens) // TOKEN_BYTES):
            key = prefix(tokens, p)
            if not any(key in self.trees.get(v, {}) for v in versions):
                break
            num_tokens = p + 1
            if len(rows) == p:
                answers = [(v, self.trees.get(v, {}).get(key)) for v in order]
                answers = [(v, row) for v, row in answers if row is not None]
                # A known row wins over a missing one, whatever the policy.
                rows += sorted(answers, key=lambda answer: answer[1] == MISSING)[:1]
        return num_tokens, rows

    def adopt(self, session: ModelSession, tokens: bytes, versions: Collection[int]) -> None:
        common = 0
        while common < min(len(tokens), len(session.tokens)) // TOKEN_BYTES and prefix(
            tokens, common
        ) == prefix(session.tokens, common):
            common += 1
        self.counts.forks += common < session.num_tokens
        role = "tool" if session.tokens else "prompt"
        session.tokens = tokens
        session.roles = session.roles[:common] + [role] * (len(tokens) // TOKEN_BYTES - common)
        del session.rows[common:]
        before = len(session.rows)
        session.rows += self._rows_from(tokens, versions, before)
        self.counts.rows_reused += len(session.rows) - before

    def _rows_from(
        self, tokens: bytes, versions: Collection[int], first: int
    ) -> list[tuple[int, bytes]]:
        """Rows known from ``first`` on without a gap; earlier ones may be unknown."""
        rows = []
        order = sorted(versions, reverse=self.policy == "latest")
        for p in range(first, len(tokens) // TOKEN_BYTES):
            answers = [(v, self.trees.get(v, {}).get(prefix(tokens, p))) for v in order]
            answers = [(v, row) for v, row in answers if row is not None]
            if not answers:
                break
            rows.append(min(answers, key=lambda answer: answer[1] == MISSING))
        return rows

    def record_nothing(self, session: ModelSession, new: bytes, version: int, end: int) -> None:
        self._append(session, new, end)
        session.version = max(session.version, version)
        self.counts.replies_without_rows += 1

    def record(self, session: ModelSession, new: bytes, reply: ModelReply) -> None:
        prefill_end = reply.start + reply.num_prefill
        self._append(session, new, prefill_end)
        tree = self.trees.setdefault(reply.version, {})
        self.after_eviction.clear()
        known = len(session.rows)
        for p in self._replaced(session, reply):
            row = reply.rows[p - reply.start]
            session.rows[p] = (reply.version, row)
            self._publish(reply.version, prefix(session.tokens, p), row)
        for p in range(known, reply.start + len(reply.rows)):
            key, row = prefix(session.tokens, p), reply.rows[p - reply.start]
            siblings = tree.get(key)
            if siblings is None:
                tree[key] = row
            else:
                self.disagreements.compare(siblings, row, session.turn, session.roles[p])
                if row == MISSING or (
                    self.policy == "first" and p < prefill_end and siblings != MISSING
                ):
                    row = siblings
                elif self.policy == "latest" or siblings == MISSING:
                    tree[key] = row
            session.rows.append((reply.version, row))
        for p in range(session.num_tokens):
            tree.setdefault(prefix(session.tokens, p), None)
        session.version = reply.version
        session.turn += 1
        self.counts.rows_recorded += len(reply.rows)
        self.counts.rows_bad += reply.num_bad
        self.counts.rows_missing += reply.num_missing

    def _replaced(self, session: ModelSession, reply: ModelReply) -> list[int]:
        """Rows of the session that the reply's take the place of."""
        stop = min(len(session.rows), reply.start + len(reply.rows))
        places = range(reply.start, stop)
        wins: list[bool] = []
        for p in places:
            old, new = session.rows[p][1], reply.rows[p - reply.start]
            self.disagreements.compare(old, new, session.turn, session.roles[p])
            differs = old != new and new != MISSING
            wins.append(differs and (self.policy == "latest" or old == MISSING))
        if self.policy == "latest":
            self._bridge(wins, [session.rows[p][1] == reply.rows[p - reply.start] for p in places])
        return [p for p, won in zip(places, wins, strict=True) if won]

    @staticmethod
    def _bridge(wins: list[bool], equal: list[bool]) -> None:
        """Equal rows between two replaced ones come from the reply too: the same, in one piece."""
        last = None
        for index, won in enumerate(list(wins)):
            if won:
                if last is not None and all(equal[last + 1 : index]):
                    wins[last + 1 : index] = [True] * (index - last - 1)
                last = index

    def _publish(self, version: int, key: bytes, row: bytes) -> None:
        known = self.trees[version].get(key)
        if known in (None, MISSING) or (self.policy == "latest" and row != MISSING):
            self.trees[version][key] = row
        else:
            self.after_eviction[version, key] = row

    @staticmethod
    def _append(session: ModelSession, new: bytes, prefill_end: int) -> None:
        known, stop = session.num_tokens, session.num_tokens + len(new) // TOKEN_BYTES
        middle = min(max(known, prefill_end), stop)
        session.tokens += new
        session.roles += ["tool" if known else "prompt"] * (middle - known)
        session.roles += ["assistant"] * (stop - middle)

    def forget(self, found: dict[int, Tree]) -> None:
        """Take over what an eviction left; it must be a part of what was known."""
        for version, entries in found.items():
            tree = self.trees[version]
            for key, row in entries.items():
                assert key in tree
                expected = (None, tree[key], self.after_eviction.get((version, key)))
                assert row in expected, (version, np.frombuffer(key, np.int32), row, expected)
        self.trees = found
        self.after_eviction.clear()
