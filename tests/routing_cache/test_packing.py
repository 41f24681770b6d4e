"""Batches: shared rows once, lazy reading by layer and token range, digests after every hop."""

import numpy as np
import pytest
from cache_truth import LAYOUT, TOY, random_rows, true_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from routing_cache import (
    ArrayRows,
    CodecError,
    DigestMismatchError,
    LayoutError,
    PackedRows,
    RoutingCache,
    RowsLease,
    gather_ranges,
    pack,
    zigzag_ranges,
)

PROMPT = tuple(range(40))


def group(size: int = 4) -> tuple[list[RowsLease], list[tuple[int, ...]]]:
    """Samples with one prompt and their own completions, in turn order."""
    cache = RoutingCache(LAYOUT)
    leases, samples = [], []
    for member in range(size):
        session = cache.session(1, engine="e")
        tokens: tuple[int, ...] = ()
        for turn in range(3):
            prompt = (*(tokens or PROMPT), *((90 + turn,) if turn else ()))
            session.adopt(np.array(prompt, np.int32))
            tokens = (*prompt, 50 + member, 60 + turn, 70)
            start = session.num_rows
            session.record(
                np.array(tokens[len(prompt) :], np.int32),
                true_rows(1, tokens, start, len(tokens) - 1),
                start=start,
                weight_version=1,
                num_prefill=len(prompt) - start,
            )
        leases.append(session.lease())
        samples.append(tokens)
    return leases, samples


def assert_sample(batch: PackedRows, index: int, tokens: tuple[int, ...]) -> None:
    rows, present = batch[index].gather()
    assert present.tolist() == [True] * (len(tokens) - 1) + [False]
    np.testing.assert_array_equal(rows[:-1], true_rows(1, tokens, 0, len(tokens) - 1))
    batch[index].verify(np.array(tokens, np.int32))


def test_every_shared_row_travels_once() -> None:
    leases, samples = group()
    batch = pack([*leases, *leases])
    unique = 40 + 4 * (len(samples[0]) - 1 - 40)
    assert batch.num_unique_rows == unique
    received = PackedRows.from_bytes(batch.tobytes())
    assert len(received) == 8
    for index, tokens in enumerate([*samples, *samples]):
        assert_sample(received, index, tokens)
        assert_sample(batch, index, tokens)
    assert received[0].weight_versions == (1,)
    assert {kind for *_, (_, _, kind) in received[0].provenance} == {"prefill", "decode"}
    received[0].release()
    assert [sample.index for sample in received] == list(range(8))
    with pytest.raises(IndexError):
        received[8]


def test_windows_that_overlap_partly_share_what_they_can() -> None:
    cache = RoutingCache(LAYOUT)
    session = cache.session(1)
    tokens = tuple(range(30))
    session.record(
        np.array(tokens, np.int32),
        true_rows(1, tokens, 0, 29),
        start=0,
        weight_version=1,
        num_prefill=20,
    )
    branches = [session.branch(at) for at in (5, 13, 13, 25, 30)]
    batch = PackedRows.from_bytes(pack([b.lease() for b in branches]).tobytes())
    assert batch.num_unique_rows == 29
    for sample, at in zip(batch, (5, 13, 13, 25, 30), strict=True):
        known = min(at, 29)
        rows, present = sample.gather()
        assert present.sum() == known == sample.num_rows
        np.testing.assert_array_equal(rows[:known], true_rows(1, tokens, 0, known))
        sample.verify(np.array(tokens[:at], np.int32))


def test_a_lost_or_short_sample_is_a_state_and_pairs_survive_permutation_and_splits() -> None:
    """Four samples, the second without rows, the third one row short; permuted, split over DP."""
    leases, samples = group()
    cache = RoutingCache(LAYOUT)
    without = cache.session(1)
    without.record(np.array(samples[1], np.int32), None, start=0, weight_version=1, num_prefill=40)
    short = cache.session(1)
    short.record(
        np.array(samples[2][:-1], np.int32),
        true_rows(1, samples[2], 0, len(samples[2]) - 2),
        start=0,
        weight_version=1,
        num_prefill=40,
    )
    short.record(
        np.array(samples[2][-1:], np.int32),
        None,
        start=len(samples[2]) - 2,
        weight_version=1,
        num_prefill=0,
    )
    four = [leases[0], without.lease(), short.lease(), leases[3]]
    order = [2, 0, 3, 1]
    for rank in range(2):
        mine = order[rank::2]
        received = PackedRows.from_bytes(pack([four[i] for i in mine]).tobytes())
        for sample, index in zip(received, mine, strict=True):
            sample.verify(np.array(samples[index], np.int32))
            missing = int((~sample.gather()[1][:-1]).sum())
            assert missing == {0: 0, 1: len(samples[1]) - 1, 2: 1, 3: 0}[index]
            for other in range(4):
                if other != index:
                    with pytest.raises(DigestMismatchError, match=f"sample {sample.index}"):
                        sample.verify(np.array(samples[other], np.int32))


@pytest.mark.parametrize("blocks", [None, (0, 1)])
def test_any_change_on_the_way_is_noticed(blocks: tuple[int, ...] | None) -> None:
    """Each single byte of header and payload."""
    leases, samples = group(2)
    ids = [np.array(s, np.int32) for s in samples]
    data = bytearray(pack(leases, layer_blocks=blocks, token_ids=ids).tobytes())

    def check() -> None:
        for sample, own in zip(PackedRows.from_bytes(data), ids, strict=True):
            sample.verify(own)

    check()
    for place in range(len(data)):
        data[place] ^= 0x10
        with pytest.raises((CodecError, DigestMismatchError)):
            check()
        data[place] ^= 0x10


@pytest.mark.parametrize("change", ["token", "version", "swap"])
def test_each_mismatch_is_caught_when_the_sample_comes_in(change: str) -> None:
    leases, samples = group(2)
    received = PackedRows.from_bytes(pack(leases).tobytes())
    ids = [np.array(s, np.int32) for s in samples]
    if change == "swap":
        ids.reverse()
    elif change == "token":
        ids[0][3] += 1
    else:
        atoms = received.tables.atoms
        moved = atoms[0].origin._replace(weight_version=2)
        object.__setattr__(atoms[0], "origin", moved)
    with pytest.raises(DigestMismatchError):
        received[0].verify(ids[0])


def test_shared_rows_are_hashed_once_but_every_samples_tokens_are_checked() -> None:
    leases, samples = group()
    received = PackedRows.from_bytes(pack(leases).tobytes())
    for index, tokens in enumerate(samples):
        received[index].verify(np.array(tokens, np.int32))
    assert received.bytes_read == received.num_unique_rows * LAYOUT.row_bytes
    wrong = np.array(samples[1], np.int32)
    wrong[0] += 1
    with pytest.raises(DigestMismatchError):
        received[1].verify(wrong)


def test_a_pipeline_stage_reads_its_layers_and_a_context_rank_its_tokens() -> None:
    rng = np.random.default_rng(0)
    rows = random_rows(rng, 63, TOY)
    ids = np.arange(64, dtype=np.int32)
    source = ArrayRows(TOY, ids, rows)
    data = pack([source], layer_blocks=(0, 1), token_ids=[ids]).tobytes()
    requests: list[int] = []

    def read(offset: int, num_bytes: int) -> bytes:
        requests.append(num_bytes)
        return data[offset : offset + num_bytes]

    received = PackedRows.from_reader(read, len(data))
    part, present = gather_ranges(received[0], zigzag_ranges(64, 1, 2), layers=[1, 2])
    np.testing.assert_array_equal(part, rows[16:48][:, 1:])
    assert present.all()
    assert received.bytes_read == 32 * 2 * 2
    received[0].verify(ids, layers=[0])
    assert received.bytes_read == 32 * 2 * 2 + 63 * 2
    everything, _ = received[0].gather(layers=[2, 0])
    np.testing.assert_array_equal(everything[:63], rows[:, [2, 0]])


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_layers_and_range_read_like_the_source(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 20))
    rows = random_rows(np.random.default_rng(length), length - 1, TOY)
    present = np.array(
        data.draw(st.lists(st.booleans(), min_size=length - 1, max_size=length - 1)), bool
    )
    ids = np.arange(length, dtype=np.int32)
    source = ArrayRows(TOY, ids, rows, present)
    blocks = data.draw(st.sampled_from([None, (0, 2), (0, 1, 2)]))
    batch = PackedRows.from_bytes(pack([source], layer_blocks=blocks, token_ids=[ids]).tobytes())
    layers = data.draw(st.none() | st.lists(st.integers(0, 2), max_size=4))
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, length))
    for one, two in zip(
        source.gather(layers=layers, start=start, stop=stop),
        batch[0].gather(layers=layers, start=start, stop=stop),
        strict=True,
    ):
        np.testing.assert_array_equal(one, two)
    batch[0].verify(ids)


def test_a_packed_batch_outlives_its_leases() -> None:
    leases, samples = group(2)
    batch = pack(leases)
    for lease in leases:
        lease.release()
    assert_sample(PackedRows.from_bytes(batch.tobytes()), 1, samples[1])


def test_what_cannot_be_packed_is_refused() -> None:
    leases, samples = group(2)
    other = ArrayRows(TOY, np.arange(3, dtype=np.int32), np.zeros((2, 3, 2), np.uint8))
    plain = RoutingCache(LAYOUT, digest=False).session(1)
    plain.record(
        np.arange(3, dtype=np.int32),
        true_rows(1, (0, 1, 2), 0, 2),
        start=0,
        weight_version=1,
        num_prefill=0,
    )
    with pytest.raises(LayoutError, match="nothing to pack"):
        pack([])
    with pytest.raises(LayoutError, match="different models"):
        pack([leases[0], other])
    with pytest.raises(LayoutError, match="digest keys"):
        pack([leases[0], plain.lease()])
    for blocks in ((1,), (0, 0), (0, 2), ()):
        with pytest.raises(LayoutError, match="layer_blocks"):
            pack(leases, layer_blocks=blocks)
    with pytest.raises(LayoutError, match="token_ids"):
        pack(leases, layer_blocks=(0, 1))
    swapped = [np.array(s, np.int32) for s in reversed(samples)]
    with pytest.raises(DigestMismatchError):
        pack(leases, layer_blocks=(0, 1), token_ids=swapped)
    without = PackedRows.from_bytes(pack([plain.lease()]).tobytes())
    np.testing.assert_array_equal(without[0].gather()[0][:2], true_rows(1, (0, 1, 2), 0, 2))
    with pytest.raises(DigestMismatchError, match="no digests"):
        without[0].verify(np.arange(3, dtype=np.int32))


def test_truncated_and_foreign_batches_are_refused() -> None:
    data = pack(group(2)[0]).tobytes()
    for cut in (0, 7, 39, 60, len(data) // 2, len(data) - 1):
        with pytest.raises(CodecError):
            PackedRows.from_bytes(data[:cut])
    with pytest.raises(CodecError, match="no packed batch"):
        PackedRows.from_bytes(b"x" * 100)
    with pytest.raises(CodecError):
        PackedRows.from_bytes(data + b"x")

    def short(offset: int, size: int) -> bytes:
        return data[offset : offset + size] if offset < 40 else data[offset : offset + size - 1]

    with pytest.raises(CodecError):
        PackedRows.from_reader(short, len(data))[0].gather()
