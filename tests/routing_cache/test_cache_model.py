"""The cache against a dictionary: any sequence of operations, checked after each of them.

``ROUTING_CACHE_EXAMPLES`` sets the number of examples of the long run.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from cache_truth import LAYOUT, check_integrity, true_row, true_rows
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

from routing_cache import PackedRows, RoutingCache, RowsLease, Session, pack

Tokens = tuple[int, ...]
TOKEN = st.integers(0, 2)
FEW_TOKENS = st.lists(TOKEN, min_size=1, max_size=5).map(tuple)
VERSIONS = st.sets(st.integers(1, 3), min_size=1)


@dataclass
class ModelSession:
    """What a session must be: its tokens, and which version made each row."""

    real: Session
    version: int
    tokens: Tokens = ()
    row_versions: list[int] = field(default_factory=list)
    turn: int = 0


@dataclass
class ModelLease:
    real: RowsLease
    tokens: Tokens
    row_versions: list[int]


class CacheMachine(RuleBasedStateMachine):
    sessions = Bundle("sessions")
    leases = Bundle("leases")

    @initialize(
        policy=st.sampled_from(["first", "latest"]),
        histories=st.lists(st.lists(TOKEN, min_size=2, max_size=8).map(tuple), max_size=4),
    )
    def start(self, policy: str, histories: list[Tokens]) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.policy = policy
        self.cache = RoutingCache(
            LAYOUT,
            conflict_policy=policy,  # type: ignore[arg-type]
            budget_bytes=1 << 30,
            spill_dir=Path(self.folder.name) / "spill",
        )
        self.rows: dict[int, set[Tokens]] = {}  # version -> prefixes whose last row is known
        self.known_tokens: dict[int, set[Tokens]] = {}  # version -> prefixes in the tree
        self.live: list[ModelSession] = []
        self.seeded: list[ModelSession] = []
        self.live_leases: list[ModelLease] = []
        self.lossy = False  # after an eviction the tree may know less than the model
        for number, history in enumerate(histories):
            session = self.open_session(1 + number % 2)
            self.record(session, history[:1], history[1:], False, 0)
            self.seeded.append(session)

    @rule(target=sessions)
    def take_seeded(self) -> ModelSession:
        """Hand the sessions of the start to the other rules, one by one."""
        return self.seeded.pop() if self.seeded else multiple()

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()

    @rule(target=sessions, version=st.integers(1, 3))
    def new_session(self, version: int) -> ModelSession:
        return self.open_session(version)

    def open_session(self, version: int) -> ModelSession:
        model = ModelSession(self.cache.session(version, engine=f"e{version}"), version)
        self.live.append(model)
        return model

    @rule(session=sessions, keep=st.integers(0, 30), more=FEW_TOKENS)
    def adopt(self, session: ModelSession, keep: int, more: Tokens) -> None:
        """Extend the history, or leave it somewhere and go on differently."""
        self.adopt_tokens(session, keep, more)

    def adopt_tokens(self, session: ModelSession, keep: int, more: Tokens) -> None:
        tokens = session.tokens[:keep] + more
        known = session.real.adopt(np.array(tokens, np.int32))
        common = 0
        while (
            common < min(len(tokens), len(session.tokens))
            and tokens[common] == session.tokens[common]
        ):
            common += 1
        del session.row_versions[common:]
        session.tokens = tokens
        expected = len(session.row_versions)
        while expected < len(tokens) and tokens[: expected + 1] in self.rows.get(
            session.version, set()
        ):
            expected += 1
        assert known == session.real.num_rows
        assert known <= expected if self.lossy else known == expected
        session.row_versions += [session.version] * (known - len(session.row_versions))

    @rule(
        session=sessions,
        observed=st.lists(TOKEN, max_size=2).map(tuple),
        sampled=FEW_TOKENS,
        newer=st.booleans(),
        back=st.integers(0, 4),
    )
    def take_turn(
        self, session: ModelSession, observed: Tokens, sampled: Tokens, newer: bool, back: int
    ) -> None:
        """A turn: a suffix, or a reply that overlaps what is known, maybe under newer weights."""
        self.record(session, observed, sampled, newer, back)

    def record(
        self, session: ModelSession, observed: Tokens, sampled: Tokens, newer: bool, back: int
    ) -> None:
        if newer:
            session.version = min(3, session.version + 1)
        new = observed + sampled
        tokens = session.tokens + new
        known = len(session.row_versions)
        start = max(0, known - back)
        stop = len(tokens) - 1
        if start > stop:
            return
        prompt = len(session.tokens) + len(observed)
        session.real.record(
            np.array(new, np.int32),
            true_rows(session.version, tokens, start, stop),
            start=start,
            weight_version=session.version,
            num_prefill=min(max(0, prompt - start), stop - start),
            turn=session.turn,
        )
        session.turn += 1
        session.tokens = tokens
        version_rows = self.rows.setdefault(session.version, set())
        version_tokens = self.known_tokens.setdefault(session.version, set())
        version_tokens.update(tokens[: p + 1] for p in range(len(tokens)))
        for p in range(start, stop):
            prefix = tokens[: p + 1]
            if p >= known:
                session.row_versions.append(session.version)
                version_rows.add(prefix)
            elif self.policy == "latest" and true_row(session.version, prefix) != true_row(
                session.row_versions[p], prefix
            ):
                session.row_versions[p] = session.version
                version_rows.add(prefix)
        self.check_match(self.cache, tokens, {session.version})
        self.check_match(self.cache, tokens[: 1 + len(tokens) // 2], {1, 2, 3})

    @rule(session=sessions, keep=st.integers(0, 30), observed=FEW_TOKENS, sampled=FEW_TOKENS)
    def play(self, session: ModelSession, keep: int, observed: Tokens, sampled: Tokens) -> None:
        """What an agent loop does: the prompt is adopted, then the reply recorded."""
        self.adopt_tokens(session, keep, observed)
        self.record(session, (), sampled, False, 0)

    @rule(target=sessions, version=st.integers(1, 2), prompt=FEW_TOKENS, sampled=FEW_TOKENS)
    def sibling(self, version: int, prompt: Tokens, sampled: Tokens) -> ModelSession:
        """Another sample of a group, which may have come when its prompt was not known yet."""
        session = self.open_session(version)
        self.record(session, prompt, sampled, False, 0)
        return session

    @rule(session=sessions, sampled=FEW_TOKENS)
    def record_nothing(self, session: ModelSession, sampled: Tokens) -> None:
        """A reply without rows: the tokens are known, their rows are asked for again."""
        before = session.real.num_rows
        session.real.record(
            np.array(sampled, np.int32),
            None,
            start=before,
            weight_version=session.version,
            num_prefill=0,
        )
        session.tokens += sampled
        assert session.real.num_rows == before

    @rule(target=sessions, session=sessions, at=st.integers(0, 30))
    def branch(self, session: ModelSession, at: int) -> ModelSession:
        at = min(at, len(session.tokens))
        twin = ModelSession(
            session.real.branch(at),
            session.version,
            session.tokens[:at],
            session.row_versions[:at],
            session.turn,
        )
        self.live.append(twin)
        return twin

    @rule(session=consumes(sessions))
    def close(self, session: ModelSession) -> None:
        session.real.close()
        self.live.remove(session)

    @rule(target=leases, session=sessions)
    def lease(self, session: ModelSession) -> ModelLease:
        if not session.tokens:
            return multiple()
        model = ModelLease(session.real.lease(), session.tokens, list(session.row_versions))
        self.live_leases.append(model)
        return model

    @rule(lease=consumes(leases))
    def release(self, lease: ModelLease) -> None:
        lease.real.release()
        lease.real.release()
        self.live_leases.remove(lease)

    @rule(tokens=st.lists(TOKEN, max_size=12).map(tuple), versions=VERSIONS)
    def match(self, tokens: Tokens, versions: set[int]) -> None:
        self.check_match(self.cache, tokens, versions)

    @rule(session=sessions, versions=VERSIONS)
    def match_history(self, session: ModelSession, versions: set[int]) -> None:
        self.check_match(self.cache, session.tokens, versions)

    def check_match(self, cache: RoutingCache, tokens: Tokens, versions: set[int]) -> None:
        num_tokens = num_rows = 0
        for p in range(len(tokens)):
            prefix = tokens[: p + 1]
            if any(prefix in self.known_tokens.get(v, ()) for v in versions):
                num_tokens = p + 1
            if num_rows == p and any(prefix in self.rows.get(v, ()) for v in versions):
                num_rows = p + 1
        found = cache.match(np.array(tokens, np.int32), versions)
        if self.lossy:
            assert found.num_tokens <= num_tokens
            assert found.num_rows <= num_rows
        else:
            assert (found.num_tokens, found.num_rows) == (num_tokens, num_rows)
        with cache.lease(np.array(tokens, np.int32), versions) as lease:
            assert lease.num_rows == found.num_rows
            rows, _ = lease.gather(stop=lease.num_rows)
            order = sorted(versions, reverse=self.policy == "latest")
            for p in range(lease.num_rows):
                prefix = tokens[: p + 1]
                makers = [v for v in order if prefix in self.rows.get(v, ())]
                expected = [np.array(true_row(v, prefix)) for v in makers]
                candidates = expected if self.lossy else expected[:1]
                assert any(np.array_equal(rows[p], row) for row in candidates)

    @rule(before=st.integers(1, 4))
    def retire(self, before: int) -> None:
        report = self.cache.retire(before=before)
        for version in [v for v in self.rows if v < before]:
            if version in report.held_versions:
                self.lossy = True
                continue
            del self.rows[version]
            del self.known_tokens[version]
            assert self.cache.match(np.array([0, 1], np.int32), {version}).num_tokens == 0
        assert set(report.held_versions).isdisjoint(report.retired_versions)

    @rule(num_bytes=st.integers(1, 5000))
    def evict(self, num_bytes: int) -> None:
        self.cache.evict(num_bytes)
        self.lossy = True

    @rule()
    def spill(self) -> None:
        self.cache.spill(1 << 20)

    @precondition(lambda self: self.live_leases)
    @rule(blocks=st.sampled_from([None, (0, 1)]))
    def pack_all(self, blocks: tuple[int, ...] | None) -> None:
        ids = [np.array(lease.tokens, np.int32) for lease in self.live_leases]
        batch = pack([m.real for m in self.live_leases], layer_blocks=blocks, token_ids=ids)
        received = PackedRows.from_bytes(batch.tobytes())
        for sample, model in zip(received, self.live_leases, strict=True):
            self.check_rows(sample.gather(), model.tokens, model.row_versions)
            sample.verify(np.array(model.tokens, np.int32))

    @rule()
    def save_and_load(self) -> None:
        path = Path(self.folder.name) / "saved"
        self.cache.save(path)
        loaded = RoutingCache.load(path, layout=LAYOUT)
        check_integrity(loaded)
        for model in self.live:
            for versions in ({1}, {1, 2, 3}):
                tokens = np.array(model.tokens, np.int32)
                assert loaded.match(tokens, versions) == self.cache.match(tokens, versions)
                self.check_match(loaded, model.tokens, versions)

    def check_rows(
        self, gathered: tuple[np.ndarray, np.ndarray], tokens: Tokens, row_versions: list[int]
    ) -> None:
        rows, present = gathered
        known = len(row_versions)
        assert present[:known].all()
        assert not present[known:].any()
        assert (rows[known:] == LAYOUT.missing).all()
        for p, version in enumerate(row_versions):
            np.testing.assert_array_equal(rows[p], true_row(version, tokens[: p + 1]))

    @invariant()
    def everything_holds(self) -> None:
        if not hasattr(self, "cache"):
            return
        check_integrity(self.cache)
        for model in self.live:
            with model.real.lease() as own:
                self.check_rows(own.gather(), model.tokens, model.row_versions)
            assert model.real.num_tokens == len(model.tokens)
            assert model.real.num_rows == len(model.row_versions)
            assert tuple(model.real.token_ids.tolist()) == model.tokens
        for lease in self.live_leases:
            self.check_rows(lease.real.gather(), lease.tokens, lease.row_versions)
            lease.real.verify(np.array(lease.tokens, np.int32))
            assert lease.real.weight_versions == tuple(sorted(set(lease.row_versions)))


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
    run(examples=60, steps=20)


@pytest.mark.slow
def test_the_cache_behaves_like_a_dictionary_for_long() -> None:
    run(examples=int(os.environ.get("ROUTING_CACHE_EXAMPLES", "100")), steps=30)
