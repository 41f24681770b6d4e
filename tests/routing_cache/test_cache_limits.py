"""Edges: budgets, damaged files, implausible models, hostile replies."""

import hashlib
import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from cache_truth import LAYOUT, TOY, check_integrity, random_rows, true_rows

from routing_cache import (
    BudgetError,
    CodecError,
    LayoutError,
    PackedRows,
    PayloadError,
    RoleSpan,
    RoutingCache,
    RowCountError,
    RowLayout,
    RowsLease,
)
from routing_cache.batch_format import _COUNTS, _PREFIX
from routing_cache.codec import decode, encode, header
from routing_cache.digest import Digester
from routing_cache.payload_arrays import read_npy
from routing_cache.payloads import read_flat, read_sglang, read_vllm
from routing_cache.probe import ProbeReply, ProbeRequest, probe

ONE_LAYER = RowLayout(1, (0,), 16, 2)
TOKENS = np.arange(10, dtype=np.int32)


def rows_a_and_b() -> tuple[np.ndarray, np.ndarray]:
    """Two answers for nine tokens that differ in every row."""
    first = np.tile(np.array([0, 1], np.uint8), (9, 1, 1))
    return first, first + np.uint8(4)


def record(cache: RoutingCache, rows: np.ndarray, version: int = 1, prefill: int = 9) -> str:
    with cache.session(version) as session:
        session.record(TOKENS, rows, start=0, weight_version=version, num_prefill=prefill)
        with session.lease() as lease:
            return letters(lease.gather(stop=9)[0])


def letters(rows: np.ndarray) -> str:
    return "".join({0: "A", 4: "B", 255: "-"}[int(first)] for first in rows[:, 0, 0])


def in_tree(cache: RoutingCache, *versions: int) -> str:
    with cache.lease(TOKENS, set(versions)) as lease:
        return letters(lease.gather(stop=9)[0])


@pytest.mark.parametrize(
    ("policy", "prefill", "session", "tree"),
    [
        ("first", 9, "AAABAAAAA", "AAABAAAAA"),
        ("first", 0, "BBBBBABBB", "AAABAAAAA"),
        ("latest", 9, "BBBBBABBB", "BBBBBABBB"),
    ],
)
def test_a_row_that_one_sibling_knows_wins_over_a_missing_one(
    policy: str, prefill: int, session: str, tree: str
) -> None:
    """The first answer misses row 3, the second row 5; elsewhere the policy decides."""
    cache = RoutingCache(ONE_LAYER, conflict_policy=policy)  # type: ignore[arg-type]
    first, second = rows_a_and_b()
    first[3], second[5] = 255, 255
    assert record(cache, first) == "AAA-AAAAA"
    assert record(cache, second, prefill=prefill) == session
    assert in_tree(cache, 1) == tree


@pytest.mark.parametrize(("policy", "expected"), [("first", "AAABAAAAA"), ("latest", "BBBBBABBB")])
def test_a_row_that_one_version_knows_wins_over_a_missing_one(policy: str, expected: str) -> None:
    cache = RoutingCache(ONE_LAYER, conflict_policy=policy)  # type: ignore[arg-type]
    first, second = rows_a_and_b()
    first[3], second[5] = 255, 255
    record(cache, first, version=1)
    record(cache, second, version=2)
    assert in_tree(cache, 1, 2) == expected
    with cache.lease(TOKENS, {1, 2}) as lease:
        assert lease.weight_versions == (1, 2)
        lease.verify(TOKENS)


def test_later_answers_replace_rows_in_few_pieces() -> None:
    """Rows 0, 2, 4 and so on change: one run, because pieces of one row would pile up."""
    cache = RoutingCache(ONE_LAYER, conflict_policy="latest")
    first, second = rows_a_and_b()
    with cache.session(1) as session:
        session.record(TOKENS, first, start=0, weight_version=1, num_prefill=9)
        mixed = np.where((np.arange(9) % 2 == 0)[:, None, None], second, first)
        later = np.concatenate([mixed, first[:2]])
        session.record([10, 11], later, start=0, weight_version=1, num_prefill=10)
        with session.lease() as lease:
            assert letters(lease.gather(stop=11)[0]) == "BABABABABAA"
            assert len(lease.segments) <= 3
    assert cache.stats().disagreements.differing == 5


@pytest.mark.parametrize(("policy", "own", "tree"), [("first", "AAABA", "AAAAA"), ("latest",) * 3])
def test_a_row_filled_late_leaves_what_siblings_know(policy: str, own: str, tree: str) -> None:
    """Between the two answers of one session a sibling brought the row that the first one missed.

    Under ``latest`` the second answer misses that row too, between rows that it replaces.
    """
    cache = RoutingCache(ONE_LAYER, conflict_policy=policy)  # type: ignore[arg-type]
    first, second = rows_a_and_b()
    with_gap = first.copy()
    with_gap[3] = 255
    if policy == "latest":
        own, tree = "BBB-B", "BBBAB"
        second[3] = 255
    with cache.session(1) as session:
        session.record(TOKENS, with_gap, start=0, weight_version=1, num_prefill=9)
        assert record(cache, first) == "AAAAAAAAA"
        later = np.concatenate([second, second[:1]])
        session.record([10], later, start=0, weight_version=1, num_prefill=10)
        with session.lease() as lease:
            assert letters(lease.gather(stop=5)[0]) == own
    assert in_tree(cache, 1)[:5] == tree


def test_rows_that_neither_answer_knows_are_not_compared() -> None:
    cache = RoutingCache(ONE_LAYER)
    first, _ = rows_a_and_b()
    first[3], first[4] = 255, 255
    second = first.copy()
    second[4] = 0, 1
    record(cache, first)
    record(cache, second)
    assert cache.stats().disagreements.compared == 7


def test_one_changed_id_is_missed_with_odds_near_two_to_the_minus_60() -> None:
    """An id that differs by 64 in the last places of its word leaves few bits in one of the sums.

    For which share of the other sum's values is there a colliding partner? Its differences are
    multiples of 2**14 or 2**6, so an unbiased mix allows that share of the cases and no more.
    """
    rng = np.random.default_rng(0)
    layout = RowLayout(1, (0,), 128, 8)
    multiplier = (1 << 64) - 1

    def unmixed(state: int) -> int:
        from routing_cache import digest

        zero, out = np.zeros(1, np.uint64), np.array([state], np.uint64)
        return int(digest._mix(out, zero)[0])

    for lane, bits in ((6, 14), (7, 6)):
        possible = 0
        for trial in range(2000):
            digester = Digester(layout, key=trial)
            (key,) = digester._forward.tolist()
            row = rng.permutation(64)[:8].astype(np.uint8)
            other = row.copy()
            other[lane] |= 64
            sums = [int(r.view("<u8")[0]) * key & multiplier for r in (row, other)]
            if sums[0] == sums[1]:
                continue
            # Both end alike if the other sum differs by this value: undo the last rounds.
            target = _before_last_rounds(unmixed(sums[0])) ^ _before_last_rounds(unmixed(sums[1]))
            possible += target % (1 << bits) == 0
        assert possible <= 4 * 2000 / 2**bits + 5


def _before_last_rounds(mixed: int) -> int:
    """State of the mix right after the second sum came in."""
    from routing_cache.digest import _MULTIPLIER_1, _MULTIPLIER_2

    full = (1 << 64) - 1
    mixed ^= mixed >> 32
    mixed = mixed * pow(int(_MULTIPLIER_2), -1, 1 << 64) & full
    mixed ^= (mixed >> 29) ^ (mixed >> 58)
    return mixed * pow(int(_MULTIPLIER_1), -1, 1 << 64) & full


class TestTheBudgetBoundsEverything:
    BUDGET = 1 << 18

    def cache(self) -> RoutingCache:
        return RoutingCache(LAYOUT, budget_bytes=self.BUDGET)

    def test_tokens_without_rows(self) -> None:
        cache = self.cache()
        session = cache.session(1)
        with pytest.raises(BudgetError):
            session.adopt(np.arange(100_000))
        with pytest.raises(BudgetError):
            session.record(np.arange(100_000), None, start=0, weight_version=1, num_prefill=0)
        assert (session.num_tokens, cache.stats().held_bytes) == (0, 0)
        session.adopt(np.arange(40_000))
        assert cache.stats().token_bytes == 200_000

    def test_branches(self) -> None:
        cache = self.cache()
        session = cache.session(1)
        session.adopt(np.arange(5_000))
        for _ in range(9):
            session.branch(5_000)
        with pytest.raises(BudgetError):
            session.branch(5_000)
        assert cache.stats().held_bytes <= self.BUDGET
        assert cache.stats().num_sessions == 10

    def test_a_history_under_many_versions(self) -> None:
        cache = self.cache()
        session = cache.session(0)
        tokens = tuple(range(4_000))
        session.adopt(np.array(tokens))

        def turn(version: int) -> None:
            stop, at = session.num_tokens, session.num_rows
            rows = true_rows(version, (*tokens, *range(stop - 4_000), 7), at, stop)
            session.record([7], rows, start=at, weight_version=version, num_prefill=stop - at)

        for version in range(8):
            turn(version)
            assert cache.stats().held_bytes <= self.BUDGET
        with pytest.raises(BudgetError):
            turn(8)
        assert cache.stats().held_bytes <= self.BUDGET

    def test_closing_gives_the_tokens_back(self) -> None:
        cache = self.cache()
        for _ in range(50):
            with cache.session(1) as session:
                session.adopt(np.arange(20_000))
                session.adopt(np.arange(10))
                assert cache.stats().token_bytes == 50
        assert cache.stats().token_bytes == 0

    def test_a_refused_record_leaves_no_pin(self) -> None:
        cache = RoutingCache(TOY, budget_bytes=60_000)
        rng = np.random.default_rng(0)
        rows = random_rows(rng, 99, TOY)
        with cache.session(1) as first:
            first.record(np.arange(100), rows, start=0, weight_version=1, num_prefill=99)
        second = cache.session(1)
        more = np.concatenate([rows, random_rows(rng, 5_000, TOY)])
        with pytest.raises(BudgetError):
            second.record(np.arange(5_100), more, start=0, weight_version=1, num_prefill=5_099)
        assert all(slab.pins == 0 for slab in cache.core.store._slabs)
        check = second.num_tokens, second.num_rows
        assert check == (0, 0)
        second.record(np.arange(100), rows, start=0, weight_version=1, num_prefill=99)
        assert second.num_rows == 99

    def test_a_disk_that_takes_nothing_is_a_refusal(self, tmp_path: Path) -> None:
        blocked = tmp_path / "file"
        blocked.write_text("not a folder")
        cache = RoutingCache(LAYOUT, budget_bytes=self.BUDGET, spill_dir=blocked)
        leases = list[tuple[RowsLease, tuple[int, ...]]]()

        def fill(first: int) -> None:
            tokens = (first, *range(1, 2_000))
            rows = true_rows(1, tokens, 0, 1_999)
            with cache.session(1) as session:
                session.record(np.array(tokens), rows, start=0, weight_version=1, num_prefill=9)
                leases.append((session.lease(), tokens))

        for first in range(7):
            fill(first)
        with pytest.raises(BudgetError, match="spilling failed"):
            fill(7)
        for lease, tokens in leases:
            lease.verify(np.array(tokens))
        check_integrity(cache)


def test_role_spans_must_be_possible() -> None:
    with RoutingCache(ONE_LAYER).session(1) as session:
        for span in (RoleSpan("nobody", 0, 1), RoleSpan("tool", 5, 11), RoleSpan("tool", -1, 2)):  # type: ignore[arg-type]
            with pytest.raises(RowCountError, match="role span"):
                session.record(
                    TOKENS,
                    rows_a_and_b()[0],
                    start=0,
                    weight_version=1,
                    num_prefill=9,
                    role_spans=[span],
                )
        assert session.num_tokens == 0


def test_ids_of_no_expert_are_bad_and_marks_are_missing() -> None:
    """All ids out of range is damage, unless each is an engine's own mark of an unknown id."""
    cache = RoutingCache(ONE_LAYER)
    rows = np.array([[[16, 17]], [[-1, -1]], [[-1, 3]], [[1, 2]]])
    with cache.session(1) as session:
        session.record(np.arange(5), rows, start=0, weight_version=1, num_prefill=4)
        assert session.lease().gather(stop=4)[1].tolist() == [False, False, False, True]
    assert (cache.stats().rows_bad, cache.stats().rows_missing) == (2, 1)


def test_keys_and_ids_of_another_kind_are_refused() -> None:
    cache = RoutingCache(ONE_LAYER)
    with pytest.raises(LayoutError, match="whole int32"):
        cache.match(b"\1\0\0\0\2", {1})
    with pytest.raises(LayoutError, match="vector of integers"):
        cache.match([[1], [2, 3]], {1})
    with cache.session(1) as session, pytest.raises(LayoutError, match="must be an array"):
        session.record([1, 2], [[[0, 1]]], start=0, weight_version=1, num_prefill=1)  # type: ignore[arg-type]


# Files and blocks


def huge_block(flags: int) -> bytes:
    """65,536 layers of 65,535 experts and no row: eight kilobytes that name 4e9 ids a row."""
    fixed = header._FIXED.pack(
        b"RRX1", 1, b"<", 0, flags, 2, 0, 0, 0, 65536, 65536, 65535, 65535, 0, 0, bytes(16)
    )
    body = fixed + b"\xff" * 8192
    return body + struct.pack("<I", zlib.crc32(body))


def packed_header(hidden: int, top_k: int, origins: bytes) -> bytes:
    layers = np.arange(hidden, dtype="<u4").tobytes()
    counts = _COUNTS.pack(hidden, hidden, 65535, top_k, 0, 1, 1, 0, 0, 0, 0, len(origins))
    body = counts + layers + np.array([0, hidden], "<u4").tobytes() + origins
    body += b" " * (-(_PREFIX.size + len(body)) % 8)
    check = hashlib.blake2b(body, digest_size=16).digest()
    return _PREFIX.pack(b"RRPACK1\n", _PREFIX.size + len(body), 0, check) + body


def saved_file(path: Path, **changes: object) -> Path:
    index: dict[str, object] = {
        "layout": [3, [1, 2], 8, 2],
        "conflict_policy": "first",
        "digest_key": 5,
        "with_digests": True,
        "origins": [["e", 1, "decode"]],
        "versions": [],
    }
    text = json.dumps(index | changes).encode()
    body = struct.pack("<8sQ", b"RRCACHE1", len(text)) + text + bytes(12)
    path.write_bytes(body + hashlib.blake2b(body, digest_size=32).digest())
    return path


@pytest.mark.parametrize("flags", [header.FLAG_ORDERED, header.FLAG_ORDERED | header.FLAG_BLAKE2B])
def test_a_small_block_that_names_a_huge_model_is_refused(flags: int) -> None:
    with pytest.raises(CodecError, match="implausible"):
        decode(huge_block(flags))


def test_a_packed_header_is_believed_as_little() -> None:
    with pytest.raises(CodecError, match="implausible"):
        PackedRows.from_bytes(packed_header(4096, 65535, b"[]"))
    with pytest.raises(CodecError, match="provenance"):
        PackedRows.from_bytes(packed_header(3, 2, b'[["e", Infinity, "decode"]]'))


@pytest.mark.parametrize(
    "changes",
    [
        {"versions": [[1, [[-1, 10**15, 1, []]]]]},
        {"versions": [[1, [[-1, 10**30, 1, []]]]]},
        {"versions": [[1, [[-1, -3, 1, []]]]]},
        {"versions": [[float("inf"), []]]},
        {"layout": [4096, list(range(4096)), 65535, 65535]},
    ],
)
def test_a_saved_file_is_believed_as_little(changes: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(CodecError):
        RoutingCache.load(saved_file(tmp_path / "cache", **changes))


def test_what_the_header_cannot_hold_is_refused() -> None:
    rows = rows_a_and_b()[0]
    with pytest.raises(CodecError, match="fit the header"):
        encode(rows, ONE_LAYER, start=1 << 32)
    with pytest.raises(CodecError, match="fit the header"):
        encode(rows, ONE_LAYER, weight_version=1 << 63)
    with pytest.raises(CodecError, match="unknown checksum"):
        encode(rows, ONE_LAYER, checksum="md5")  # type: ignore[arg-type]


def test_a_base_of_another_dtype_is_the_same_base() -> None:
    first, second = rows_a_and_b()
    data = encode(second, ONE_LAYER, "delta", base=first.astype(np.int64))
    np.testing.assert_array_equal(decode(data, base=first).rows, second)


# Replies


def test_a_list_that_is_no_array_costs_nothing() -> None:
    """numpy would make one array of a long string and many short ones: 18 GiB for this reply."""
    for value in (
        [["x" * 10**6] + [""] * 5000],
        [[["x" * 10**6] + [""] * 5000]],
        [[[1, 2]], [[1]]],
        [[[1, True]]],
        [[[1.0, 2.0]]],
        [[[1, 2**70]]],
        [],
        [1],
    ):
        with pytest.raises(PayloadError, match="routed_experts"):
            read_vllm({"routed_experts": value}, TOY, num_tokens=2, requested_start=0)


def test_a_batch_of_replies_is_no_reply() -> None:
    for reply in ([{}], None, "text"):
        with pytest.raises(PayloadError, match="JSON object"):
            read_sglang(reply, TOY, num_tokens=2, requested_start=0)  # type: ignore[arg-type]
        with pytest.raises(PayloadError, match="JSON object"):
            read_vllm(reply, TOY, num_tokens=2, requested_start=0)  # type: ignore[arg-type]


def test_a_reply_with_nothing_new_is_empty() -> None:
    """Every fed token is known already: no bytes, whatever the layer axis."""
    read = read_flat(b"", TOY, num_tokens=5, requested_start=4)
    assert (read.rows.shape, read.start) == ((0, 3, 2), 4)
    with pytest.raises(PayloadError):
        read_flat(b"", TOY, num_tokens=5, requested_start=3)


def test_an_npy_shape_that_numpy_cannot_hold_is_refused() -> None:
    shape = (
        b"{'descr': '|u1', 'fortran_order': False, 'shape': (0, 999999999999, 999999999999), }\n"
    )
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(shape)) + shape
    with pytest.raises(PayloadError, match="does not hold"):
        read_npy(data)


def test_a_probe_refuses_the_same_experts_everywhere() -> None:
    """Valid rows that never change prove nothing about the start index."""

    def ask(request: ProbeRequest) -> ProbeReply:
        num_rows = len(request.token_ids) + 3 - 1 - request.start
        rows = np.tile(np.array([0, 1], np.uint8), (num_rows, 3, 1))
        return ProbeReply((1, 2, 3), rows)

    with pytest.raises(PayloadError, match="no known form"):
        probe(ask, TOY, range(11))
