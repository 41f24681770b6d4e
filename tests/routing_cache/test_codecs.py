"""Encodings: exact round trips, sizes, and what hostile bytes do."""

import os
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from cache_truth import TOY, random_rows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from routing_cache import CodecError, DigestMismatchError, LayoutError, RoutingCacheError, RowLayout
from routing_cache.bench_workload import make_rows
from routing_cache.codec import decode, elias_fano, encode
from routing_cache.codec.bits import id_bits, pack_ids, unpack_ids

LAYOUTS = [
    RowLayout(4, (1, 2, 3), 8, 2),
    RowLayout(4, (0, 1, 2, 3), 64, 8),
    RowLayout(3, (0, 2), 128, 8),
    RowLayout(3, (0, 1, 2), 255, 4),
    RowLayout(3, (0, 1, 2), 256, 8),
    RowLayout(3, (0, 1), 512, 22),
    RowLayout(2, (1,), 60_000, 3),
    RowLayout(1, (0,), 1, 1),
    RowLayout(1, (0,), 300, 1),
    RowLayout(1, (0,), 100, 64),
    RowLayout(1, (0,), 2, 2),
]
IDS = [f"{layout.num_experts}x{layout.moe_top_k}" for layout in LAYOUTS]
FUZZ = int(os.environ.get("ROUTING_CACHE_EXAMPLES", "0")) or 100


def some_rows(layout: RowLayout, num_rows: int, missing: bool = False) -> np.ndarray:
    rng = np.random.default_rng(num_rows)
    shape = (num_rows, layout.num_moe_layers, 1)
    first = rng.integers(0, layout.num_experts, shape)
    rows = ((first + np.arange(layout.moe_top_k)) % layout.num_experts).astype(layout.dtype)
    if missing:
        rows[:: max(1, num_rows // 3)] = layout.missing
    return rows


@pytest.mark.parametrize("checksum", ["fast", "blake2b"])
@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("encoding", ["raw", "bits", "elias_fano"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_rows_come_back_as_they_were(
    layout: RowLayout, encoding: str, missing: bool, checksum: str
) -> None:
    for num_rows in (0, 1, 7, 40):
        rows = some_rows(layout, num_rows, missing)
        ids = np.arange(num_rows, dtype=np.int32)
        data = encode(
            rows,
            layout,
            encoding,
            start=5,
            weight_version=-3,
            token_ids=ids,
            checksum=checksum,  # type: ignore[arg-type]
        )
        decoded = decode(data, layout=layout)
        wanted = np.sort(rows, axis=2) if encoding == "elias_fano" else rows
        np.testing.assert_array_equal(decoded.rows, wanted)
        assert decoded.rows.dtype == layout.dtype
        header = decoded.header
        assert (header.start, header.weight_version, header.checksum) == (5, -3, checksum)
        assert header.ordered == (encoding != "elias_fano")
        decoded.verify(ids)
        if num_rows:
            with pytest.raises(DigestMismatchError):
                decoded.verify(ids + 1)


@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_a_delta_gives_the_new_rows_and_knows_its_base(layout: RowLayout) -> None:
    base = some_rows(layout, 200)
    rows = base.copy()
    rng = np.random.default_rng(1)
    for p in (3, 4, 150):
        rows[p, 0] = np.roll(rows[p, 0], 1)
    rows[199] = layout.missing
    data = encode(rows, layout, "delta", base=base)
    np.testing.assert_array_equal(decode(data, base=base).rows, rows)
    same = encode(base, layout, "delta", base=base)
    np.testing.assert_array_equal(decode(same, base=base).rows, base)
    other = base.copy()
    other[rng.integers(200)] = layout.missing
    with pytest.raises(CodecError, match="another base"):
        decode(data, base=other)
    with pytest.raises(CodecError, match="another shape"):
        decode(data, base=base[:-1])
    with pytest.raises(CodecError, match="needs its base"):
        decode(data)


@pytest.mark.parametrize(("experts", "bits"), [(64, 6), (128, 7), (256, 8), (512, 9)])
def test_bit_widths_follow_from_the_number_of_experts(experts: int, bits: int) -> None:
    layout = RowLayout(48, tuple(range(48)), experts, 8)
    rows = some_rows(layout, 100)
    assert id_bits(experts) == bits
    payload = 100 * 48 * 8 * bits // 8
    assert payload < len(encode(rows, layout, "bits")) < payload + 120


def test_sizes_of_the_reference_layout() -> None:
    layout = RowLayout(48, tuple(range(48)), 128, 8)
    rows = make_rows(np.random.default_rng(0), 800)
    raw = len(encode(rows, layout))
    assert raw < rows.nbytes + 120
    assert len(encode(rows, layout, "bits")) / raw < 0.876
    assert len(encode(rows, layout, "elias_fano")) / raw < 0.751


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 16), st.lists(st.integers(0, 65535), max_size=50))
def test_bit_packing_for_every_width(width: int, values: list[int]) -> None:
    ids = np.array([v % (1 << width) for v in values], np.uint16)
    packed = pack_ids(ids, width)
    np.testing.assert_array_equal(unpack_ids(memoryview(packed), len(ids), width), ids)


def test_bit_packing_across_chunks() -> None:
    ids = np.random.default_rng(0).integers(0, 1 << 7, 300_001).astype(np.uint8)
    np.testing.assert_array_equal(unpack_ids(memoryview(pack_ids(ids, 7)), len(ids), 7), ids)


def test_what_cannot_be_encoded_is_refused() -> None:
    rows = some_rows(TOY, 4)
    bad = rows.copy()
    bad[1, 0] = [3, 3]
    for encoding in ("bits", "elias_fano"):
        with pytest.raises(CodecError, match="bad rows"):
            encode(bad, TOY, encoding)  # type: ignore[arg-type]
    with pytest.raises(CodecError, match="base"):
        encode(rows, TOY, "delta")
    with pytest.raises(CodecError, match="base"):
        encode(rows, TOY, "raw", base=rows)
    with pytest.raises(CodecError, match="unknown encoding"):
        encode(rows, TOY, "zip")  # type: ignore[arg-type]
    with pytest.raises(CodecError, match="token_ids"):
        encode(rows, TOY, token_ids=np.zeros(3, np.int32))
    with pytest.raises(CodecError, match="another shape"):
        encode(rows, TOY, "delta", base=rows[:2])
    with pytest.raises(LayoutError):
        encode(rows[:, :1], TOY)
    with pytest.raises(DigestMismatchError, match="without token ids"):
        decode(encode(rows, TOY)).verify(np.zeros(4, np.int32))
    bound = decode(encode(rows, TOY, token_ids=np.zeros(4, np.int32)))
    with pytest.raises(DigestMismatchError, match="another length"):
        bound.verify(np.zeros(3, np.int32))


def test_another_model_and_too_many_bytes_are_refused() -> None:
    rows = some_rows(TOY, 4)
    with pytest.raises(CodecError, match="another model"):
        decode(encode(rows, TOY), layout=LAYOUTS[1])
    with pytest.raises(CodecError, match="too many rows"):
        decode(encode(rows, TOY), max_bytes=23)
    decode(encode(rows, TOY), max_bytes=24)


ENCODED = [
    encode(some_rows(layout, 9, missing), layout, encoding, token_ids=np.arange(9, dtype=np.int32))
    for layout in LAYOUTS[:6]
    for encoding in ("raw", "bits", "elias_fano")
    for missing in (False, True)
]
DELTA_BASE = some_rows(TOY, 9)
ENCODED.append(encode(some_rows(TOY, 9, True), TOY, "delta", base=DELTA_BASE))


@pytest.mark.parametrize("number", range(len(ENCODED)))
def test_every_cut_and_every_damaged_byte_is_refused(number: int) -> None:
    data = ENCODED[number]
    base = DELTA_BASE if number == len(ENCODED) - 1 else None
    decode(data, base=base)
    for cut in range(len(data)):
        with pytest.raises(CodecError):
            decode(data[:cut], base=base)
    with pytest.raises(CodecError):
        decode(data + b"\0", base=base)
    for place in range(len(data)):
        broken = bytearray(data)
        broken[place] ^= 0x41
        with pytest.raises(CodecError):
            decode(broken, base=base)


def reseal(data: bytearray) -> bytes:
    """Give a changed header the checksum that makes it look right."""
    hidden = struct.unpack_from("<I", data, 28)[0]
    end = 80 + min(hidden, 1 << 16) // 8 + (hidden % 8 > 0)
    if len(data) >= end + 4:
        struct.pack_into("<I", data, end, zlib.crc32(data[:end]))
    return bytes(data)


@settings(max_examples=FUZZ, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_hostile_bytes_give_the_packages_own_errors_or_valid_rows(data: st.DataObject) -> None:
    """Random bytes, and real blocks with changed fields whose header checksum was made right."""
    kind = data.draw(st.sampled_from(["random", "mutated", "resealed"]))
    if kind == "random":
        blob = b"RRX1" * data.draw(st.booleans()) + data.draw(st.binary(max_size=200))
    else:
        blob = bytearray(data.draw(st.sampled_from(ENCODED)))
        for _ in range(data.draw(st.integers(1, 4))):
            place = data.draw(st.integers(0, len(blob) - 1))
            blob[place] = data.draw(st.integers(0, 255))
        blob = reseal(blob) if kind == "resealed" else bytes(blob)
    tracemalloc.start()
    try:
        decoded = decode(blob, base=DELTA_BASE, max_bytes=1 << 20)
    except RoutingCacheError:
        pass
    else:
        shape = (
            decoded.header.num_rows,
            decoded.header.layout.num_moe_layers,
            decoded.header.layout.moe_top_k,
        )
        assert decoded.rows.shape == shape
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 16 << 20


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[2], LAYOUTS[5]], ids=str)
def test_a_set_that_is_none_is_refused_even_without_a_checksum(layout: RowLayout) -> None:
    """Two equal or falling low parts under one high part, and an id past the last expert."""
    k, experts = layout.moe_top_k, layout.num_experts
    good = np.tile(np.arange(k, dtype=layout.dtype), (2, layout.num_moe_layers, 1))
    encoded = bytearray(elias_fano.encode(good, layout))
    np.testing.assert_array_equal(elias_fano.decode(memoryview(encoded), 2, layout), good)
    unary = (k + ((experts - 1) >> ((experts // k).bit_length() - 1)) + 7) // 8
    lows = 2 * layout.num_moe_layers * unary
    encoded[lows:] = bytes(len(encoded) - lows)  # all low parts zero: ids repeat
    with pytest.raises(CodecError, match="no set"):
        elias_fano.decode(memoryview(encoded), 2, layout)
    top = experts - k + np.arange(k)
    encoded = bytearray(
        elias_fano.encode(np.broadcast_to(top, good.shape).astype(layout.dtype), layout)
    )
    encoded[:unary] = bytes(unary)
    with pytest.raises(CodecError, match="number of ones"):
        elias_fano.decode(memoryview(encoded), 2, layout)


def test_a_header_that_claims_four_billion_rows_allocates_nothing() -> None:
    data = bytearray(encode(some_rows(TOY, 4), TOY, "bits"))
    struct.pack_into("<I", data, 12, 2**32 - 1)
    tracemalloc.start()
    with pytest.raises(CodecError):
        decode(reseal(data))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_random_rows_of_the_helper_are_valid() -> None:
    decode(encode(random_rows(np.random.default_rng(0), 5, TOY), TOY, "bits"))
