"""The cache against a dictionary: any sequence of operations, checked after each of them.

``ROUTING_CACHE_EXAMPLES`` and ``ROUTING_CACHE_STEPS`` set the size of the long run.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pytest
from cache_truth import LAYOUT, check_integrity, key_of, true_row
from dictionary_model import (
    MISSING,
    DictionaryCache,
    ModelReply,
    ModelSession,
    prefix,
    snapshot,
)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from routing_cache import (
    BudgetError,
    LayoutError,
    PackedRows,
    RoutingCache,
    RowCountError,
    RowsLease,
    Session,
    pack,
)

TOKEN = st.integers(0, 1)
FEW_TOKENS = st.lists(TOKEN, min_size=1, max_size=5).map(lambda ids: np.array(ids, np.int32))
ANY_TOKENS = st.lists(TOKEN, max_size=12).map(lambda ids: np.array(ids, np.int32))
VERSIONS = st.sets(st.integers(1, 3), min_size=1)
# What a reply says in row after row: the truth, two other sets, the truth in another order,
# missing (by either mark), bad (a repeated id, an id past the last one).
KINDS = "tttabrm-dx"
PATTERN = st.text(st.sampled_from(KINDS), min_size=1, max_size=6)
SMALL_BUDGET = 16_000


@dataclass(frozen=True)
class Answer:
    """How an engine answers: which rows from where, and in which form."""

    pattern: str
    back: int  # rows before the session's end that come again; many: a full reply
    prefill: str  # what counts as prefilled: the prompt, nothing, everything
    newer: bool  # under the next weight version
    all_layers: bool
    wide: bool  # int32


ANSWERS = st.builds(
    Answer,
    PATTERN,
    st.sampled_from([0, 0, 1, 2, 5, 99]),
    st.sampled_from(["prompt", "prompt", "none", "all"]),
    st.sampled_from([False, False, True]),
    st.booleans(),
    st.booleans(),
)
PLAIN = Answer("t", 0, "prompt", False, False, False)


def answer_row(kind: str, version: int, tokens: bytes) -> tuple[list[int], bytes]:
    """Ids as the engine sends them ``[L * K]``, and what must become of them."""
    ids = np.array(true_row(version, tuple(np.frombuffer(tokens, np.int32).tolist())), np.int64)
    if kind in "ab":
        ids = (ids + (5 if kind == "a" else 3)) % LAYOUT.num_experts
    elif kind == "r":
        ids = ids[:, ::-1]
    good = ids.astype(np.uint8).tobytes()
    if kind in "m-":
        return [255 if kind == "m" else -1] * ids.size, MISSING
    if kind == "d":
        ids[1] = ids[1, 0]
    elif kind == "x":
        ids[0, 1] = LAYOUT.num_experts
    return ids.reshape(-1).tolist(), MISSING if kind in "dx" else good


@dataclass(eq=False)
class LiveSession:
    real: Session
    model: ModelSession


@dataclass(eq=False)
class LiveLease:
    real: RowsLease
    tokens: bytes
    rows: list[tuple[int, bytes]]


class CacheMachine(RuleBasedStateMachine):
    sessions = Bundle("sessions")
    leases = Bundle("leases")

    @initialize(
        policy=st.sampled_from(["first", "latest"]),
        memory=st.sampled_from(["plenty", "plenty", "tight", "tight, spilling"]),
        histories=st.lists(st.tuples(FEW_TOKENS, FEW_TOKENS, ANSWERS), max_size=4),
    )
    def start(
        self, policy: str, memory: str, histories: list[tuple[np.ndarray, np.ndarray, Answer]]
    ) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.tight = memory != "plenty"
        self.cache = RoutingCache(
            LAYOUT,
            conflict_policy=policy,  # type: ignore[arg-type]
            budget_bytes=SMALL_BUDGET if self.tight else 1 << 30,
            spill_dir=None if memory == "tight" else Path(self.folder.name) / "spill",
        )
        self.known = DictionaryCache(policy)
        self.live: list[LiveSession] = []
        self.seeded: list[LiveSession] = []
        self.live_leases: list[LiveLease] = []
        for number, (prompt, sampled, answer) in enumerate(histories):
            session = self.open_session(1 + number % 2)
            self.record(session, prompt, sampled, answer)
            self.seeded.append(session)

    @rule(target=sessions)
    def take_seeded(self) -> LiveSession:
        """Hand the sessions of the start to the other rules, one by one."""
        return self.seeded.pop() if self.seeded else multiple()

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()

    def open_session(self, version: int) -> LiveSession:
        session = LiveSession(
            self.cache.session(version, engine=f"e{version}"), ModelSession(version)
        )
        self.live.append(session)
        return session

    @contextmanager
    def may_be_refused(self) -> Iterator[None]:
        """Under a small budget; what was refused must have changed nothing but evicted."""
        try:
            yield
        except BudgetError:
            assert self.tight

    def forget_evicted(self) -> None:
        """Other calls than evict() and retire() forget only to make room."""
        found = snapshot(self.cache)
        if self.tight:
            self.known.forget(found)
        assert found == {version: tree for version, tree in self.known.trees.items() if tree}

    # What sessions do

    @rule(target=sessions, version=st.integers(1, 3))
    def new_session(self, version: int) -> LiveSession:
        return self.open_session(version)

    @rule(session=sessions, keep=st.integers(0, 30), more=FEW_TOKENS, versions=st.none() | VERSIONS)
    def adopt(
        self, session: LiveSession, keep: int, more: np.ndarray, versions: set[int] | None
    ) -> None:
        """Extend the history, or leave it somewhere and go on differently."""
        tokens = session.model.tokens[: 4 * keep] + more.tobytes()
        with self.may_be_refused():
            known = session.real.adopt(np.frombuffer(tokens, np.int32), weight_versions=versions)
            self.forget_evicted()
            self.known.adopt(session.model, tokens, versions or {session.model.version})
            assert known == session.real.num_rows == len(session.model.rows)

    @rule(session=sessions, observed=ANY_TOKENS, sampled=FEW_TOKENS, answer=ANSWERS)
    def take_turn(
        self, session: LiveSession, observed: np.ndarray, sampled: np.ndarray, answer: Answer
    ) -> None:
        self.record(session, observed[:2], sampled, answer)

    @rule(session=sessions, keep=st.integers(0, 30), observed=FEW_TOKENS, sampled=FEW_TOKENS)
    def play(
        self, session: LiveSession, keep: int, observed: np.ndarray, sampled: np.ndarray
    ) -> None:
        """What an agent loop does: the prompt is adopted, then the reply recorded."""
        self.adopt(session, keep, observed, None)
        self.record(session, observed[:0], sampled, PLAIN)

    @rule(
        target=sessions,
        version=st.integers(1, 2),
        prompt=FEW_TOKENS,
        sampled=FEW_TOKENS,
        answer=ANSWERS,
    )
    def sibling(
        self, version: int, prompt: np.ndarray, sampled: np.ndarray, answer: Answer
    ) -> LiveSession:
        """Another sample of a group, which may have come when its prompt was not known yet."""
        session = self.open_session(version)
        self.record(session, prompt, sampled, answer)
        return session

    def record(
        self, session: LiveSession, observed: np.ndarray, sampled: np.ndarray, answer: Answer
    ) -> None:
        model = session.model
        new = observed.tobytes() + sampled.tobytes()
        version = min(3, model.version + answer.newer)
        start = max(0, len(model.rows) - answer.back)
        tokens = model.tokens + new
        stop = len(tokens) // 4 - 1
        prompt = model.num_tokens + len(observed)
        prefill = {"prompt": prompt - start, "none": 0, "all": stop - start}[answer.prefill]
        num_prefill = min(max(0, prefill), stop - start)
        kinds = [answer.pattern[p % len(answer.pattern)] for p in range(stop - start)]
        if not answer.wide:  # an unsigned reply cannot hold -1
            kinds = ["m" if kind == "-" else kind for kind in kinds]
        pairs = [
            answer_row(kind, version, prefix(tokens, p)) for p, kind in enumerate(kinds, start)
        ]
        rows = np.array([ids for ids, _ in pairs], np.int32).reshape(-1, *true_shape())
        if answer.all_layers:
            rows = np.concatenate([np.zeros_like(rows[:, :1]), rows], axis=1)
        reply = ModelReply(
            [row for _, row in pairs],
            start,
            num_prefill,
            version,
            sum(kind in "dx" for kind in kinds),
            sum(kind in "m-" for kind in kinds),
        )
        with self.may_be_refused():
            session.real.record(
                np.frombuffer(new, np.int32),
                rows if answer.wide else rows.astype(np.uint8),
                start=start,
                weight_version=version,
                num_prefill=num_prefill,
                turn=model.turn,
            )
            self.known.record(model, new, reply)
        self.forget_evicted()
        self.check_match(self.cache, tokens, {version})

    @rule(target=sessions, session=sessions, sampled=FEW_TOKENS, theirs=ANSWERS, pattern=PATTERN)
    def rivals(
        self, session: LiveSession, sampled: np.ndarray, theirs: Answer, pattern: str
    ) -> LiveSession:
        """Another session answers for the same tokens, then this one does so again, in full."""
        model = session.model
        sibling = self.open_session(model.version)
        self.record(sibling, np.frombuffer(model.tokens, np.int32), sampled, theirs)
        self.record(session, sampled[:0], sampled, Answer(pattern, 99, "prompt", False, True, True))
        return sibling

    @rule(session=sessions, sampled=FEW_TOKENS, version=st.integers(1, 3), num_prefill=st.just(1))
    def record_nothing(
        self, session: LiveSession, sampled: np.ndarray, version: int, num_prefill: int
    ) -> None:
        """A reply without rows: the tokens are known, their rows are asked for again."""
        start = len(session.model.rows)
        with self.may_be_refused():
            session.real.record(
                sampled, None, start=start, weight_version=version, num_prefill=num_prefill
            )
            self.known.record_nothing(
                session.model, sampled.tobytes(), version, start + num_prefill
            )

    @rule(session=sessions, fault=st.sampled_from(["gap", "negative", "short", "long", "model"]))
    def is_refused(self, session: LiveSession, fault: str) -> None:
        """Replies that do not fit; the invariants see that nothing changed."""
        known = len(session.model.rows)
        start = {"gap": known + 1, "negative": -1}.get(fault, known)
        num_rows = session.model.num_tokens - start + {"short": -1, "long": 1}.get(fault, 0)
        shape = (max(0, num_rows), LAYOUT.num_moe_layers, LAYOUT.moe_top_k + (fault == "model"))
        rows = np.zeros(shape, np.uint8)
        rows[:] = np.arange(shape[2])
        new = [1] if num_rows >= 0 else [1, 1]
        with pytest.raises((RowCountError, LayoutError)):
            session.real.record(new, rows, start=start, weight_version=1, num_prefill=0)

    @rule(target=sessions, session=sessions, at=st.integers(0, 30))
    def branch(self, session: LiveSession, at: int) -> LiveSession:
        model = session.model
        at = min(at, model.num_tokens)
        with self.may_be_refused():
            twin = LiveSession(
                session.real.branch(at),
                ModelSession(
                    model.version, model.tokens[: 4 * at], model.roles[:at], model.rows[:at]
                ),
            )
            twin.model.turn = model.turn
            self.live.append(twin)
            return twin
        return multiple()

    @rule(session=consumes(sessions))
    def close(self, session: LiveSession) -> None:
        session.real.close()
        self.live.remove(session)

    # What readers do

    @rule(target=leases, session=sessions)
    def lease(self, session: LiveSession) -> LiveLease:
        lease = LiveLease(session.real.lease(), session.model.tokens, list(session.model.rows))
        self.live_leases.append(lease)
        return lease

    @rule(target=leases, tokens=ANY_TOKENS, versions=VERSIONS)
    def lease_without_session(self, tokens: np.ndarray, versions: set[int]) -> LiveLease:
        _, rows = self.known.lookup(tokens.tobytes(), versions)
        lease = LiveLease(self.cache.lease(tokens, versions), tokens.tobytes(), rows)
        self.live_leases.append(lease)
        return lease

    @rule(lease=consumes(leases))
    def release(self, lease: LiveLease) -> None:
        lease.real.release()
        lease.real.release()
        self.live_leases.remove(lease)

    @rule(tokens=ANY_TOKENS, versions=VERSIONS)
    def match(self, tokens: np.ndarray, versions: set[int]) -> None:
        self.check_match(self.cache, tokens.tobytes(), versions)

    @rule(session=sessions, versions=VERSIONS)
    def match_history(self, session: LiveSession, versions: set[int]) -> None:
        self.check_match(self.cache, session.model.tokens, versions)

    def check_match(self, cache: RoutingCache, tokens: bytes, versions: set[int]) -> None:
        num_tokens, rows = self.known.lookup(tokens, versions)
        makers = tuple(sorted({version for version, _ in rows}))
        assert cache.match(tokens, versions) == (num_tokens, len(rows), makers)
        ids = np.frombuffer(tokens, np.int32)
        with cache.lease(ids, versions) as lease:
            self.check_lease(LiveLease(lease, tokens, rows))

    def check_lease(self, lease: LiveLease) -> None:
        num_tokens, num_rows = len(lease.tokens) // 4, len(lease.rows)
        assert (lease.real.num_tokens, lease.real.num_rows) == (num_tokens, num_rows)
        check_rows(lease.real.gather(), lease)
        lease.real.verify(np.frombuffer(lease.tokens, np.int32))
        assert lease.real.weight_versions == tuple(sorted({v for v, _ in lease.rows}))

    @precondition(lambda self: any(lease.tokens for lease in self.live_leases))
    @rule(blocks=st.sampled_from([None, (0, 1)]))
    def pack_all(self, blocks: tuple[int, ...] | None) -> None:
        leases = [lease for lease in self.live_leases if lease.tokens]
        ids = [np.frombuffer(lease.tokens, np.int32) for lease in leases]
        batch = pack([lease.real for lease in leases], layer_blocks=blocks, token_ids=ids)
        for sample, lease in zip(PackedRows.from_bytes(batch.tobytes()), leases, strict=True):
            check_rows(sample.gather(), lease)
            sample.verify(np.frombuffer(lease.tokens, np.int32))

    # What the owner does

    @rule(before=st.integers(1, 4))
    def retire(self, before: int) -> None:
        pinned, num_known = self.pinned_entries(), self.num_answered()
        report = self.cache.retire(before=before)
        found = snapshot(self.cache)
        for version, tree in self.known.trees.items():
            assert version < before or found.get(version, {}) == tree
        assert set(report.held_versions) == {v for v in found if v < before}
        assert not set(report.held_versions) & set(report.retired_versions)
        self.known.forget(found)
        assert pinned <= self.pinned_entries()
        assert report.rows_dropped == num_known - self.num_answered()
        for version, tree in self.cache.core.trees.items():
            leaves = [node for node in tree.nodes() if not node.children]
            assert version >= before or all(leaf.payload.pinned_slab() for leaf in leaves)

    @rule(num_bytes=st.integers(1, 5000))
    def evict(self, num_bytes: int) -> None:
        pinned, held = self.pinned_entries(), self.cache.held_bytes()
        freed = self.cache.evict(num_bytes)
        assert freed == held - self.cache.held_bytes()
        self.known.forget(snapshot(self.cache))
        assert pinned <= self.pinned_entries()
        if freed < num_bytes:
            nodes = [node for _, tree in self.cache.core.trees.items() for node in tree.nodes()]
            assert all(node.payload.pinned_slab() for node in nodes if not node.children)

    @precondition(lambda self: self.cache.core.store.spill_dir is not None)
    @rule()
    def spill(self) -> None:
        self.cache.spill(1 << 20)
        assert all(
            slab.open or slab.spilled or not slab.used for slab in self.cache.core.store._slabs
        )

    @rule()
    def save_and_load(self) -> None:
        path = Path(self.folder.name) / "saved"
        assert self.cache.save(path) == path.stat().st_size
        loaded = RoutingCache.load(path, layout=LAYOUT)
        check_integrity(loaded, (), rows_are_true=False)
        assert snapshot(loaded) == snapshot(self.cache)
        for session in self.live[:3]:
            self.check_match(loaded, session.model.tokens, {1, 2, 3})
        loaded.evict(1 << 30)
        assert (loaded.held_bytes(), snapshot(loaded)) == (0, {})

    def pinned_entries(self) -> set[tuple[int, bytes]]:
        """Tokens whose rows a session or a lease needs."""
        return {
            (version, key_of(node)[: 4 * stop])
            for version, tree in self.cache.core.trees.items()
            for node in tree.nodes()
            for segment in node.payload.segments
            if segment.slab.pins
            for stop in range(segment.start + 1, segment.stop + 1)
        }

    def num_answered(self) -> int:
        return sum(row is not None for tree in self.known.trees.values() for row in tree.values())

    @invariant()
    def everything_holds(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.forget_evicted()
        check_integrity(self.cache, [lease.real for lease in self.live_leases], rows_are_true=False)
        for session in self.live:
            model = session.model
            assert session.real.token_ids.tobytes() == model.tokens
            with session.real.lease() as own:
                self.check_lease(LiveLease(own, model.tokens, model.rows))
        for lease in self.live_leases:
            self.check_lease(lease)
        stats = self.cache.stats()
        assert not self.tight or stats.held_bytes <= SMALL_BUDGET
        counts = asdict(self.known.counts)
        assert {name: getattr(stats, name) for name in counts} == counts
        expected = asdict(self.known.disagreements)
        assert asdict(stats.disagreements) | {"by_layer": [*stats.disagreements.by_layer]} == (
            expected
        )


def true_shape() -> tuple[int, int]:
    return LAYOUT.num_moe_layers, LAYOUT.moe_top_k


def check_rows(gathered: tuple[np.ndarray, np.ndarray], lease: LiveLease) -> None:
    """Rows and presence, beyond the last row too."""
    rows, present = gathered
    expected = [row for _, row in lease.rows]
    expected += [MISSING] * (len(lease.tokens) // 4 - len(expected))
    assert rows.tobytes() == b"".join(expected)
    assert present.tolist() == [row != MISSING for row in expected]


def run(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        CacheMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_cache_behaves_like_a_dictionary() -> None:
    run(examples=40, steps=20)


@pytest.mark.slow
def test_the_cache_behaves_like_a_dictionary_for_long() -> None:
    run(
        examples=int(os.environ.get("ROUTING_CACHE_EXAMPLES", "100")),
        steps=int(os.environ.get("ROUTING_CACHE_STEPS", "30")),
    )
