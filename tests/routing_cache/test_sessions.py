"""Conversations: which rows a turn brings, sharing, forks, versions and disagreement."""

import numpy as np
import pytest
from cache_truth import LAYOUT, TOY, random_rows, true_rows

from routing_cache import (
    ClosedError,
    DigestMismatchError,
    LayoutError,
    RoleSpan,
    RoutingCache,
    RoutingCacheError,
    RowCountError,
    RowLayout,
    Session,
)
from routing_cache.payloads import merge_disaggregated, resolve_start


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def turn(
    session: Session,
    tokens: tuple[int, ...],
    prompt: int,
    *,
    start: int | None = None,
    version: int = 1,
    number: int = 0,
) -> None:
    """One reply: the session becomes ``tokens``, of which ``prompt`` were the request."""
    start = session.num_rows if start is None else start
    session.record(
        ids(*tokens[session.num_tokens :]),
        true_rows(version, tokens, start, len(tokens) - 1),
        start=start,
        weight_version=version,
        num_prefill=max(0, prompt - start),
        turn=number,
    )


TURNS = [(10, 14), (18, 22), (25, 29)]  # (prompt tokens, all tokens) of three turns


@pytest.mark.parametrize("full", [False, True])
def test_suffix_and_full_returns_give_one_row_for_each_fed_token(full: bool) -> None:
    """Three turns end in 29 tokens and 28 rows; joined full returns would be 62."""
    tokens = tuple(range(100, 129))
    session = RoutingCache(LAYOUT).session(1)
    for number, (prompt, length) in enumerate(TURNS):
        start = 0 if full else session.num_rows
        if number:
            assert session.num_rows == TURNS[number - 1][1] - 1
        turn(session, tokens[:length], prompt, start=start, number=number)
    rows, present = session.lease().gather()
    assert session.num_rows == 28
    assert present.tolist() == [True] * 28 + [False]
    np.testing.assert_array_equal(rows[:28], true_rows(1, tokens, 0, 28))


def test_asking_from_the_previous_length_loses_the_seam_row_and_is_refused() -> None:
    """With start = previous length two rows are missing; the first wrong one would be row 13."""
    tokens = tuple(range(100, 129))
    session = RoutingCache(LAYOUT).session(1)
    turn(session, tokens[:14], 10)
    with pytest.raises(RowCountError, match="rows 13 to 13 were never received"):
        turn(session, tokens[:22], 18, start=14)
    assert (session.num_tokens, session.num_rows) == (14, 13)
    turn(session, tokens[:22], 18)
    assert session.num_rows == 21


def test_a_prompt_that_was_only_prefilled_leaves_its_last_row_for_the_next_call() -> None:
    tokens = tuple(range(6))
    session = RoutingCache(LAYOUT).session(1)
    turn(session, tokens, 6)
    assert (session.num_tokens, session.num_rows) == (6, 5)
    turn(session, (*tokens, 7), 6)
    assert session.num_rows == 6


@pytest.mark.parametrize("num_rows", [0, 12, 14, 26])
def test_a_count_that_fits_no_reading_is_never_padded(num_rows: int) -> None:
    session = RoutingCache(LAYOUT).session(1)
    with pytest.raises(RowCountError, match="do not cover"):
        session.record(
            np.arange(14, dtype=np.int32),
            np.zeros((num_rows, 2, 2), np.uint8),
            start=0,
            weight_version=1,
            num_prefill=0,
        )
    assert session.num_tokens == 0


def test_counts_tell_full_from_suffix() -> None:
    assert resolve_start(28, num_tokens=29, requested_start=21) == 0
    assert resolve_start(7, num_tokens=29, requested_start=21) == 21
    assert resolve_start(5, num_tokens=6, requested_start=0) == 0
    for count in (0, 6, 8, 27, 29):
        with pytest.raises(RowCountError, match="never pad"):
            resolve_start(count, num_tokens=29, requested_start=21)


@pytest.mark.parametrize("num_prefill", [-1, 15])
def test_num_prefill_counts_rows_of_the_reply(num_prefill: int) -> None:
    session = RoutingCache(LAYOUT).session(1)
    with pytest.raises(RowCountError, match="num_prefill"):
        session.record(
            np.arange(14, dtype=np.int32),
            true_rows(1, tuple(range(14)), 0, 13),
            start=0,
            weight_version=1,
            num_prefill=num_prefill,
        )


def test_a_negative_start_and_another_model_are_refused() -> None:
    session = RoutingCache(LAYOUT).session(1)
    block = true_rows(1, (1, 2, 3), 0, 2)
    with pytest.raises(RowCountError, match="negative"):
        session.record(ids(1, 2, 3), block, start=-1, weight_version=1, num_prefill=0)
    with pytest.raises(LayoutError):
        session.record(ids(1, 2, 3), block[:, :1], start=0, weight_version=1, num_prefill=0)


def test_bad_rows_are_counted_and_missing_and_not_asked_for_again() -> None:
    """Five tokens by three layers: two good rows, an id of 9, a repeated id, a zero row."""
    rows = random_rows(np.random.default_rng(0), 5, TOY)
    rows[2, 1] = [9, 0]
    rows[3, 2] = [3, 3]
    rows[4] = 0
    cache = RoutingCache(TOY)
    session = cache.session(1)
    session.record(ids(*range(6)), rows, start=0, weight_version=1, num_prefill=3)
    gathered, present = session.lease().gather()
    assert present.tolist() == [True, True, False, False, False, False]
    assert (gathered[2:] == TOY.missing).all()
    assert cache.stats().rows_bad == 3
    assert session.num_rows == 5
    assert cache.match(ids(*range(6)), {1}).num_rows == 5


def test_rows_that_never_came_are_asked_for_again_and_filled() -> None:
    tokens = tuple(range(8))
    cache = RoutingCache(LAYOUT)
    session = cache.session(1)
    session.record(ids(*tokens[:5]), None, start=0, weight_version=1, num_prefill=3)
    assert (session.num_tokens, session.num_rows) == (5, 0)
    assert not session.lease().gather()[1].any()
    turn(session, tokens, 6)
    assert session.lease().gather()[1].tolist() == [True] * 7 + [False]
    assert cache.stats().replies_without_rows == 1


@pytest.mark.parametrize("policy", ["first", "latest"])
def test_a_later_reply_fills_missing_rows_and_never_unknows_known_ones(policy: str) -> None:
    tokens = tuple(range(6))
    truth = true_rows(1, tokens, 0, 5)
    holes = truth.copy()
    holes[1:3] = LAYOUT.missing
    other_holes = truth.copy()
    other_holes[4] = LAYOUT.missing
    cache = RoutingCache(LAYOUT, conflict_policy=policy)  # type: ignore[arg-type]
    session = cache.session(1)
    session.record(ids(*tokens), holes, start=0, weight_version=1, num_prefill=2)
    assert session.lease().gather()[1].tolist() == [True, False, False, True, True, False]
    session.record(ids(), other_holes, start=0, weight_version=1, num_prefill=2)
    rows, present = session.lease().gather()
    assert present.tolist() == [True] * 5 + [False]
    np.testing.assert_array_equal(rows[:5], truth)
    assert cache.stats().disagreements.differing == 0
    with cache.lease(ids(*tokens), {1}) as lease:
        np.testing.assert_array_equal(lease.gather()[0][:5], truth)


class TestDisaggregated:
    """The decode node got the prompt's KV and never ran it: its prompt rows mean nothing."""

    def replies(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        truth = true_rows(1, tuple(range(9)), 0, 8)
        decode = truth.copy()
        decode[:5] = 0
        return truth, truth[:5].astype(np.uint16), decode

    def test_prompt_rows_come_from_the_prefill_node(self) -> None:
        truth, prefill, decode = self.replies()
        merged = merge_disaggregated(prefill, decode, LAYOUT, num_prefill_rows=5)
        np.testing.assert_array_equal(merged, truth)
        assert merged.dtype == np.uint8

    def test_an_absent_prefill_payload_is_missing_and_not_zero(self) -> None:
        truth, _, decode = self.replies()
        merged = merge_disaggregated(None, decode, LAYOUT, num_prefill_rows=5)
        session = RoutingCache(LAYOUT).session(1)
        session.record(ids(*range(9)), merged, start=0, weight_version=1, num_prefill=5)
        rows, present = session.lease().gather()
        assert present.tolist() == [False] * 5 + [True] * 3 + [False]
        np.testing.assert_array_equal(rows[5:8], truth[5:])

    def test_a_merge_widens_and_never_casts_down(self) -> None:
        layout = RowLayout(1, (0,), 300, 1)
        prefill = np.array([[[10]], [[11]]], np.int16)
        decode = np.array([[[0]], [[0]], [[299]]], np.uint16)
        merged = merge_disaggregated(prefill, decode, layout, num_prefill_rows=2)
        assert merged.ravel().tolist() == [10, 11, 299]
        with pytest.raises(LayoutError, match="cannot hold"):
            merge_disaggregated(prefill.astype(np.uint8), decode, layout, num_prefill_rows=2)

    def test_wrong_counts_are_refused(self) -> None:
        _, prefill, decode = self.replies()
        with pytest.raises(RowCountError):
            merge_disaggregated(prefill, decode, LAYOUT, num_prefill_rows=4)
        with pytest.raises(RowCountError):
            merge_disaggregated(None, decode, LAYOUT, num_prefill_rows=9)


def test_only_the_prompt_would_be_reusable_if_the_key_were_taken_too_early() -> None:
    """Prompt 1..5, generated 6, 7, 8; asked for 1..10: eight tokens match, seven rows are known."""
    cache = RoutingCache(LAYOUT)
    session = cache.session(1)
    assert session.adopt(ids(1, 2, 3, 4, 5)) == 0
    turn(session, (1, 2, 3, 4, 5, 6, 7, 8), 5)
    match = cache.match(ids(*range(1, 11)), {1})
    assert (match.num_tokens, match.num_rows) == (8, 7)
    again = cache.session(1)
    assert again.adopt(ids(*range(1, 11))) == 7
    turn(session, (1, 2, 3, 4, 5, 6, 7, 8, 9, 10), 9)
    assert cache.match(ids(*range(1, 11)), {1}).num_rows == 9


def test_a_lookup_that_ends_inside_an_edge_counts_only_its_own_rows() -> None:
    cache = RoutingCache(LAYOUT)
    turn(cache.session(1), tuple(range(10)), 5)
    for length in range(1, 13):
        match = cache.match(ids(*range(length)), {1})
        assert (match.num_tokens, match.num_rows) == (min(length, 10), min(length, 9))


def test_siblings_share_their_prompt() -> None:
    cache = RoutingCache(LAYOUT)
    prompt = tuple(range(50))
    known = []
    for member in range(8):
        session = cache.session(1)
        known.append(session.adopt(ids(*prompt)))
        turn(session, (*prompt, 100 + member, 200), 50)
        session.close()
    assert known == [0] + [50] * 7
    assert cache.stats().rows_reused == 350
    stored = 51 + 7
    assert cache.stats().row_bytes == stored * (LAYOUT.row_bytes + 8)


def test_siblings_that_asked_at_the_same_time_still_store_the_prompt_once() -> None:
    cache = RoutingCache(LAYOUT)
    prompt = tuple(range(50))
    sessions = [cache.session(1) for _ in range(8)]
    for session in sessions:
        assert session.adopt(ids(*prompt)) == 0
    for member, session in enumerate(sessions):
        turn(session, (*prompt, 100 + member, 200), 50)
    assert cache.stats().row_bytes == (51 + 7) * (LAYOUT.row_bytes + 8)
    assert cache.stats().disagreements.compared == 7 * 50 * 2
    for member, session in enumerate(sessions):
        rows, _ = session.lease().gather()
        np.testing.assert_array_equal(rows[:51], true_rows(1, (*prompt, 100 + member, 200), 0, 51))


def test_a_branch_shares_the_prefix_and_lives_on_its_own() -> None:
    cache = RoutingCache(LAYOUT)
    session = cache.session(1)
    turn(session, tuple(range(20)), 10)
    before = cache.stats().row_bytes
    branch = session.branch(12)
    assert (branch.num_tokens, branch.num_rows) == (12, 12)
    assert cache.stats().row_bytes == before
    tokens = (*range(12), 77, 78)
    turn(branch, tokens, 12)
    session.close()
    np.testing.assert_array_equal(branch.lease().gather()[0][:13], true_rows(1, tokens, 0, 13))
    for at in (-1, 15):
        with pytest.raises(RowCountError):
            branch.branch(at)


def test_history_that_was_rendered_anew_forks_at_the_true_common_prefix() -> None:
    cache = RoutingCache(LAYOUT)
    session = cache.session(1)
    turn(session, tuple(range(20)), 10)
    assert session.adopt(ids(*range(15), 99, 98, 97)) == 15
    assert (session.num_tokens, session.num_rows) == (18, 15)
    assert cache.stats().forks == 1
    tokens = (*range(15), 99, 98, 97, 50)
    turn(session, tokens, 18)
    lease = session.lease()
    lease.verify(ids(*tokens))
    np.testing.assert_array_equal(lease.gather()[0][:18], true_rows(1, tokens, 0, 18))
    assert cache.match(ids(*range(20)), {1}).num_rows == 19  # the old history is still there


class TestVersions:
    """Version 1 stored rows 0-4 (A), version 2 answers with rows 0-8 (B)."""

    tokens = tuple(range(10))

    def build(self, policy: str) -> tuple[RoutingCache, Session]:
        cache = RoutingCache(LAYOUT, conflict_policy=policy)  # type: ignore[arg-type]
        session = cache.session(1)
        turn(session, self.tokens[:6], 3)
        turn(session, self.tokens, 7, start=0, version=2, number=1)
        return cache, session

    def expected(self, policy: str) -> np.ndarray:
        b = true_rows(2, self.tokens, 0, 9)
        if policy == "latest":
            return b
        return np.concatenate([true_rows(1, self.tokens, 0, 5), b[5:]])

    @pytest.mark.parametrize("policy", ["first", "latest"])
    def test_the_policy_decides_for_the_session_and_for_lookups(self, policy: str) -> None:
        cache, session = self.build(policy)
        lease = session.lease()
        np.testing.assert_array_equal(lease.gather()[0][:9], self.expected(policy))
        lease.verify(ids(*self.tokens))
        assert lease.weight_versions == ((1, 2) if policy == "first" else (2,))
        assert cache.match(ids(*self.tokens), {1, 2}).num_rows == 9
        found = cache.lease(ids(*self.tokens), {1, 2})
        np.testing.assert_array_equal(found.gather()[0][:9], self.expected(policy))

    @pytest.mark.parametrize("policy", ["first", "latest"])
    def test_two_sessions_under_two_versions_compose_the_same_way(self, policy: str) -> None:
        cache = RoutingCache(LAYOUT, conflict_policy=policy)  # type: ignore[arg-type]
        turn(cache.session(1), self.tokens[:6], 3)
        turn(cache.session(2), self.tokens, 7, version=2)
        found = cache.lease(ids(*self.tokens), {1, 2})
        np.testing.assert_array_equal(found.gather()[0][:9], self.expected(policy))

    def test_lookups_see_only_the_versions_they_ask_for(self) -> None:
        cache = RoutingCache(LAYOUT)
        turn(cache.session(1), self.tokens[:6], 3)
        turn(cache.session(2), self.tokens, 7, version=2)
        for version, rows in ((1, 5), (2, 9), (3, 0)):
            assert cache.match(ids(*self.tokens), {version}).num_rows == rows
        assert cache.session(3).adopt(ids(*self.tokens)) == 0
        assert cache.session(3).adopt(ids(*self.tokens), weight_versions={1}) == 5
        assert cache.match(ids(*self.tokens), ()).num_tokens == 0

    def test_a_neighbour_under_the_new_version_that_left_before_the_known_rows(self) -> None:
        """Its tree matches three tokens where this session already has four rows."""
        cache = RoutingCache(LAYOUT)
        old, new = (2, 0, 0, 0, 0), (2, 0, 0, 1, 0, 0, 1)
        session = cache.session(2)
        turn(session, old, 1, version=2)
        turn(cache.session(3), new, 5, version=3)
        turn(session, (*old, 0, 0), 5, version=3, number=1)
        rows, present = session.lease().gather()
        assert present.tolist() == [True] * 6 + [False]
        np.testing.assert_array_equal(rows[:4], true_rows(2, old, 0, 4))
        np.testing.assert_array_equal(rows[4:6], true_rows(3, (*old, 0, 0), 4, 6))
        session.lease().verify(ids(*old, 0, 0))
        assert cache.match(ids(*old, 0, 0), {3}) == (7, 3, (3,))

    def test_an_update_while_a_request_is_in_flight_keeps_the_open_session(self) -> None:
        cache = RoutingCache(LAYOUT)
        idle, busy = cache.session(1), cache.session(1)
        turn(idle, (50, 51, 52), 2)
        idle.close()
        turn(busy, self.tokens[:6], 3)
        report = cache.retire(before=2)
        assert (report.retired_versions, report.held_versions) == ((), (1,))
        assert report.rows_dropped == 2
        assert cache.match(ids(50, 51, 52), {1}).num_tokens == 0
        turn(busy, self.tokens, 7, version=2)
        assert busy.lease().weight_versions == (1, 2)
        np.testing.assert_array_equal(busy.lease().gather()[0][:9], self.expected("first"))


class TestDisagreement:
    """Rows that differ are counted by layer, turn of the later answer, and role."""

    def answers(self) -> tuple[np.ndarray, np.ndarray]:
        one = np.tile(np.array([[1, 2], [3, 4]], np.uint8), (9, 1, 1))
        two = one.copy()
        two[1, 0] = [2, 1]  # another order only
        two[2, 0] = [1, 5]  # prompt
        two[6, 1] = [3, 5]  # assistant
        two[7, :] = [7, 8]  # assistant, both layers
        return one, two

    def test_by_layer_turn_and_role(self) -> None:
        one, two = self.answers()
        cache = RoutingCache(LAYOUT)
        session = cache.session(1)
        session.record(ids(*range(10)), one, start=0, weight_version=1, num_prefill=4)
        session.record(
            ids(20, 21),
            np.concatenate([two, one[:2]]),
            start=0,
            weight_version=1,
            num_prefill=10,
            turn=5,
        )
        counts = cache.stats().disagreements
        assert counts.compared == 18
        assert counts.differing == 4
        assert counts.reordered == 1
        assert counts.by_layer == (2, 2)
        assert counts.by_turn == {5: 4}
        assert counts.by_role == {"prompt": 1, "assistant": 3}
        assert counts.fraction == 4 / 18
        np.testing.assert_array_equal(session.lease().gather()[0][:9], one)

    def test_roles_may_be_stated(self) -> None:
        one, two = self.answers()
        cache = RoutingCache(LAYOUT)
        session = cache.session(1)
        session.record(
            ids(*range(10)),
            one,
            start=0,
            weight_version=1,
            num_prefill=4,
            role_spans=[RoleSpan("tool", 5, 8)],
        )
        session.record(ids(), two, start=0, weight_version=1, num_prefill=9, turn=1)
        assert cache.stats().disagreements.by_role == {"prompt": 1, "tool": 3}

    def test_observations_are_the_tools(self) -> None:
        one, two = self.answers()
        cache = RoutingCache(LAYOUT)
        session = cache.session(1)
        session.adopt(ids(*range(4)))
        session.record(ids(4, 5), one[:5], start=0, weight_version=1, num_prefill=4)
        session.adopt(ids(*range(8)))
        session.record(ids(8, 9), one[5:], start=5, weight_version=1, num_prefill=3)
        session.record(ids(), two, start=0, weight_version=1, num_prefill=9)
        assert cache.stats().disagreements.by_role == {"prompt": 1, "tool": 3}

    def test_prompt_rows_of_a_sibling_are_shared_but_decoded_rows_stay_ones_own(self) -> None:
        """The rows behind this session's log-probabilities are the ones of its own reply."""
        one, two = self.answers()
        cache = RoutingCache(LAYOUT)
        first, second = cache.session(1), cache.session(1)
        first.record(ids(*range(10)), one, start=0, weight_version=1, num_prefill=4)
        second.record(ids(*range(10)), two, start=0, weight_version=1, num_prefill=4)
        rows, _ = second.lease().gather()
        np.testing.assert_array_equal(rows[:4], one[:4])
        np.testing.assert_array_equal(rows[4:9], two[4:])
        second.lease().verify(ids(*range(10)))
        np.testing.assert_array_equal(first.lease().gather()[0][:9], one)
        found = cache.lease(ids(*range(10)), {1})
        np.testing.assert_array_equal(found.gather()[0][:9], one)
        assert cache.stats().disagreements.differing == 4

    def test_latest_gives_new_lookups_the_later_rows_and_leaves_leases_alone(self) -> None:
        one, two = self.answers()
        cache = RoutingCache(LAYOUT, conflict_policy="latest")
        first, second = cache.session(1), cache.session(1)
        first.record(ids(*range(10)), one, start=0, weight_version=1, num_prefill=4)
        lease = first.lease()
        second.record(ids(*range(10)), two, start=0, weight_version=1, num_prefill=4)
        np.testing.assert_array_equal(lease.gather()[0][:9], one)
        found = cache.lease(ids(*range(10)), {1})
        np.testing.assert_array_equal(found.gather()[0][:9], two)


def test_every_run_knows_engine_version_and_kind() -> None:
    cache = RoutingCache(LAYOUT)
    session = cache.session(1, engine="sglang-0")
    turn(session, tuple(range(8)), 5)
    turn(session, tuple(range(13)), 10, version=2)
    runs = [(s.start, s.stop, *s.provenance) for s in session.lease().segments]
    assert runs == [
        (0, 5, "sglang-0", 1, "prefill"),
        (5, 7, "sglang-0", 1, "decode"),
        (7, 10, "sglang-0", 2, "prefill"),
        (10, 12, "sglang-0", 2, "decode"),
    ]


def test_zero_copy_views_cannot_be_written() -> None:
    session = RoutingCache(LAYOUT).session(1)
    turn(session, tuple(range(8)), 5)
    view = session.lease().segments[0].rows
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 0


def test_closed_sessions_and_released_leases_say_so() -> None:
    cache = RoutingCache(LAYOUT)
    with cache.session(1) as session:
        turn(session, tuple(range(8)), 5)
        lease = session.lease()
    session.close()
    for action in (
        session.lease,
        lambda: session.adopt(ids(1)),
        lambda: session.branch(0),
        lambda: session.record(ids(1), None, start=0, weight_version=1, num_prefill=0),
    ):
        with pytest.raises(ClosedError, match="closed"):
            action()
    assert lease.gather()[1].sum() == 7
    with lease:
        assert not lease.is_released
    assert lease.is_released
    with pytest.raises(ClosedError, match="released"):
        lease.gather()
    with pytest.raises(ClosedError):
        lease.verify(ids(*range(8)))
    assert cache.stats().num_leases == 0


@pytest.mark.parametrize(
    ("start", "stop", "layers"),
    [(0, None, None), (0, 8, [1]), (3, 6, [1, 0]), (6, 8, [0, 1]), (7, 8, []), (4, 4, None)],
)
def test_gather_takes_any_range_and_layers(
    start: int, stop: int | None, layers: list[int] | None
) -> None:
    session = RoutingCache(LAYOUT).session(1)
    turn(session, tuple(range(8)), 5)
    rows, present = session.lease().gather(layers=layers, start=start, stop=stop)
    full = np.full((8, 2, 2), LAYOUT.missing, np.uint8)
    full[:7] = true_rows(1, tuple(range(8)), 0, 7)
    columns = [0, 1] if layers is None else layers
    np.testing.assert_array_equal(rows, full[start:stop][:, columns])
    assert present.tolist() == ([True] * 7 + [False])[start:stop]


def test_gather_refuses_what_is_not_there() -> None:
    session = RoutingCache(LAYOUT).session(1)
    turn(session, tuple(range(8)), 5)
    lease = session.lease()
    for start, stop in ((-1, 3), (0, 9), (5, 4)):
        with pytest.raises(RowCountError):
            lease.gather(start=start, stop=stop)
    for layers in ([2], [-1]):
        with pytest.raises(LayoutError):
            lease.gather(layers=layers)


class TestVerify:
    """Damage that a trainer must notice when a sample comes in."""

    def leases(self) -> tuple[Session, Session]:
        cache = RoutingCache(LAYOUT)
        one, two = cache.session(1), cache.session(1)
        turn(one, tuple(range(8)), 5)
        turn(two, (*range(5), 50, 51, 52), 5)
        return one, two

    def test_one_token(self) -> None:
        one, _ = self.leases()
        for position in range(8):
            tokens = np.arange(8, dtype=np.int32)
            tokens[position] += 1
            with pytest.raises(DigestMismatchError, match=f"row {position}|behind the last row"):
                one.lease().verify(tokens)

    def test_one_id(self) -> None:
        one, _ = self.leases()
        lease = one.lease()
        slab = lease.segments[0].slab
        for p in range(7):
            slab.rows[p, 1, 1] ^= 1
            with pytest.raises(DigestMismatchError, match=f"row {p}"):
                lease.verify(np.arange(8, dtype=np.int32))
            slab.rows[p, 1, 1] ^= 1
        lease.verify(np.arange(8, dtype=np.int32))

    def test_one_version(self) -> None:
        one, _ = self.leases()
        lease = one.lease()
        part = lease.segments[0]
        lease._segments = (
            part._replace(provenance=part.provenance._replace(weight_version=2)),
            *lease.segments[1:],
        )
        with pytest.raises(DigestMismatchError, match="weight version 2"):
            lease.verify(np.arange(8, dtype=np.int32))

    def test_two_samples_swapped(self) -> None:
        one, two = self.leases()
        with pytest.raises(DigestMismatchError):
            one.lease().verify(two.token_ids)
        one.lease().verify(one.token_ids)
        two.lease().verify(two.token_ids)
        assert one.lease().digest != two.lease().digest

    def test_another_length(self) -> None:
        one, _ = self.leases()
        with pytest.raises(DigestMismatchError, match="another length"):
            one.lease().verify(np.arange(7, dtype=np.int32))

    def test_no_digests(self) -> None:
        session = RoutingCache(LAYOUT, digest=False).session(1)
        turn(session, tuple(range(8)), 5)
        assert session.lease().digest_key is None
        with pytest.raises(DigestMismatchError, match="carry no digest"):
            session.lease().verify(np.arange(8, dtype=np.int32))

    def test_the_digest_does_not_depend_on_how_the_rows_came(self) -> None:
        tokens = tuple(range(12))
        whole, turns = RoutingCache(LAYOUT).session(1), RoutingCache(LAYOUT).session(1)
        turn(whole, tokens, 5)
        turn(turns, tokens[:6], 5)
        turn(turns, tokens[:9], 7)
        turn(turns, tokens, 10)
        assert whole.lease().digest == turns.lease().digest


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(RoutingCacheError, match="conflict_policy"):
        RoutingCache(LAYOUT, conflict_policy="newest")  # type: ignore[arg-type]
    with pytest.raises(RoutingCacheError, match="budget_bytes"):
        RoutingCache(LAYOUT, budget_bytes=0)
