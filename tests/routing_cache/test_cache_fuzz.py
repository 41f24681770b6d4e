"""Every reader against input that is nearly right: fields edited one by one, checksums made good.

Random bytes end at the first checksum. Here each checksum is computed anew after an edit, so that
what stands behind it is reached: sizes, dtypes, counts, tables, payloads. Whatever comes out must
be well formed, every refusal one of the package's own errors, and memory bounded by the input.
``ROUTING_CACHE_EXAMPLES`` sets the number of examples a reader.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import struct
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from cache_truth import TOY, random_rows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from routing_cache import PackedRows, RoutingCache, RoutingCacheError, RowLayout, pack
from routing_cache.batch_format import _COUNTS, _PREFIX
from routing_cache.codec import decode, encode, header
from routing_cache.payload_arrays import read_npy
from routing_cache.payloads import EngineForm, read_flat, read_rows, read_sglang, read_vllm

FUZZ = int(os.environ.get("ROUTING_CACHE_EXAMPLES", "0")) or 80
fuzzed = settings(max_examples=FUZZ, deadline=None, suppress_health_check=list(HealthCheck))
WIDE = RowLayout(3, (0, 2), 300, 4)
EDGES = [0, 1, 2, 3, 7, 8, 127, 255, 256, 65535, 65536, 2**20, 2**31, 2**32 - 1, 2**63, 2**64 - 1]
EDGE = st.sampled_from(EDGES)


@contextmanager
def bounded(num_bytes: int) -> Iterator[None]:
    """Only the package's own errors, and memory near the size of the input."""
    tracemalloc.start()
    try:
        yield
    except RoutingCacheError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < (8 << 20) + 40 * num_bytes


def edited(data: st.DataObject, value: int, width: int, *, signed: bool = False) -> int:
    """``value`` set to an edge or moved a little, within ``width`` bytes."""
    new = data.draw(EDGE | st.sampled_from([value - 1, value + 1, 2 * value]))
    new %= 1 << 8 * width
    return new - (1 << 8 * width) if signed and new >> (8 * width - 1) else new


def edited_bytes(data: st.DataObject, blob: bytes) -> bytes:
    """Cut short, made longer, or with a byte or an aligned word changed."""
    kind = data.draw(st.sampled_from(["same", "cut", "longer", "byte", "word"]))
    if kind == "longer":
        return blob + data.draw(st.binary(min_size=1, max_size=9))
    if kind == "same" or not blob:
        return blob
    at = data.draw(st.integers(0, len(blob) - 1))
    if kind == "cut":
        return blob[:at]
    if kind == "byte":
        return blob[:at] + bytes([data.draw(st.integers(0, 255))]) + blob[at + 1 :]
    at -= at % 4
    return blob[:at] + struct.pack("<I", data.draw(EDGE) % (1 << 32)) + blob[at + 4 :]


def edited_json(data: st.DataObject, value: object) -> object:
    """One place of a JSON value replaced, dropped or doubled."""
    if isinstance(value, dict | list) and value and data.draw(st.integers(0, 4)):
        new = copy.copy(value)
        key = data.draw(st.sampled_from(sorted(new) if isinstance(new, dict) else range(len(new))))
        change = data.draw(st.sampled_from(["inside", "inside", "inside", "drop", "double"]))
        if change == "inside":
            new[key] = edited_json(data, new[key])  # type: ignore[index]
        elif change == "drop":
            del new[key]  # type: ignore[arg-type]
        elif isinstance(new, list):
            new.insert(key, new[key])
        return new
    if isinstance(value, int) and data.draw(st.booleans()):
        return value + data.draw(st.sampled_from([-1, 1, 2]))
    return data.draw(
        st.sampled_from([None, True, "", "x", [], {}, [[]], -1, 0, 0.5, float("inf"), 10**30])
        | EDGE
        | st.integers(-3, 10)
    )


# Encoded blocks

BASE = random_rows(np.random.default_rng(0), 9, TOY)


def with_missing(rows: np.ndarray, layout: RowLayout) -> np.ndarray:
    rows = rows.copy()
    rows[::4] = layout.missing
    return rows


BLOCKS = [
    encode(
        with_missing(random_rows(np.random.default_rng(1), 9, layout), layout),
        layout,
        encoding,
        start=3,
        token_ids=np.arange(9, dtype=np.int32),
    )
    for layout in (TOY, WIDE)
    for encoding in ("raw", "bits", "elias_fano")
]
BLOCKS.append(encode(with_missing(BASE, TOY), TOY, "delta", base=BASE))
FIELDS = [1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]  # positions in the fixed header
WIDTHS = [4, 1, 1, 1, 1, 1, 4, 4, 8, 4, 4, 4, 4, 8, 8, 16]


def edited_block(data: st.DataObject) -> bytes:
    block = data.draw(st.sampled_from(BLOCKS))
    fields = list(header._FIXED.unpack_from(block))
    end = header._FIXED.size + (fields[9] + 7) // 8
    layer_map, payload = block[header._FIXED.size : end], block[end + 4 :]
    for number in data.draw(st.lists(st.sampled_from(FIELDS[:-1]), max_size=3)):
        if isinstance(fields[number], int):
            width = WIDTHS[number]
            fields[number] = edited(data, fields[number], width, signed=number == 8)
    payload = edited_bytes(data, payload)
    if data.draw(st.booleans()):
        layer_map = edited_bytes(data, layer_map)
    if data.draw(st.booleans()):
        fields[13] = len(payload)
    if data.draw(st.booleans()):  # the hash of the payload, so that only its content can be wrong
        fields[4] = (fields[4] | header.FLAG_BLAKE2B) & 15
        fields[-1] = hashlib.blake2b(payload, digest_size=16).digest()
    body = header._FIXED.pack(*fields) + layer_map
    return body + struct.pack("<I", zlib.crc32(body)) + payload


@fuzzed
@given(st.data())
def test_blocks_with_edited_headers_and_payloads(data: st.DataObject) -> None:
    block = edited_block(data)
    with bounded(len(block)):
        decoded = decode(block, base=BASE, max_bytes=1 << 20)
        layout = decoded.header.layout
        shape = (decoded.header.num_rows, layout.num_moe_layers, layout.moe_top_k)
        assert (decoded.rows.shape, decoded.rows.dtype) == (shape, layout.dtype)
        decoded.verify(np.arange(len(decoded.rows), dtype=np.int32))


# Packed batches


def filled(layout: RowLayout) -> RoutingCache:
    """Two versions, a fork, a missing row."""
    cache = RoutingCache(layout)
    rng = np.random.default_rng(2)
    for version, tokens in ((1, [1, 2, 3, 4, 5]), (1, [1, 2, 9, 8, 7]), (2, [1, 2, 3])):
        with cache.session(version, engine="e") as session:
            rows = random_rows(rng, len(tokens) - 1, layout)
            rows[-1] = layout.missing
            session.record(tokens, rows, start=0, weight_version=version, num_prefill=2)
    return cache


def packed(layout: RowLayout, blocks: tuple[int, ...] | None) -> bytes:
    cache = filled(layout)
    ids = [np.array(t, np.int32) for t in ([1, 2, 3, 4, 5], [1, 2, 9, 8, 7], [4])]
    leases = [cache.lease(tokens, {1, 2}) for tokens in ids]
    return pack(leases, layer_blocks=blocks, token_ids=ids).tobytes()


BATCHES = [packed(TOY, None), packed(TOY, (0, 2)), packed(WIDE, (0, 1))]


def edited_batch(data: st.DataObject) -> bytes:
    block = data.draw(st.sampled_from(BATCHES))
    _, header_bytes, payload_bytes, _ = _PREFIX.unpack_from(block)
    counts = list(_COUNTS.unpack_from(block, _PREFIX.size))
    tables, payload = block[_PREFIX.size + _COUNTS.size : header_bytes], block[header_bytes:]
    for number in data.draw(st.lists(st.integers(0, len(counts) - 1), max_size=2)):
        counts[number] = edited(data, counts[number], 8 if number == 4 else 4)
    for _ in range(data.draw(st.integers(0, 3))):
        tables = edited_bytes(data, tables)
    if data.draw(st.booleans()):
        payload = edited_bytes(data, payload)
    if data.draw(st.booleans()):
        payload_bytes = edited(data, payload_bytes, 8)
    body = _COUNTS.pack(*counts) + tables
    header_bytes = _PREFIX.size + len(body)
    if data.draw(st.integers(0, 3)) == 0:
        header_bytes = edited(data, header_bytes, 8)
    check = hashlib.blake2b(body, digest_size=16).digest()
    return _PREFIX.pack(b"RRPACK1\n", header_bytes, payload_bytes, check) + body + payload


@fuzzed
@given(st.data())
def test_batches_with_edited_tables(data: st.DataObject) -> None:
    block = edited_batch(data)
    with bounded(len(block)):
        for sample in PackedRows.from_bytes(block):
            layout = sample.layout
            rows, present = sample.gather()
            shape = (sample.num_tokens, layout.num_moe_layers, layout.moe_top_k)
            assert (rows.shape, rows.dtype, present.shape) == (shape, layout.dtype, shape[:1])
            assert not present[sample.num_rows :].any()
            sample.verify(np.arange(sample.num_tokens, dtype=np.int32))


# Saved files


@fuzzed
@given(st.data())
def test_files_with_an_edited_index(data: st.DataObject) -> None:
    index, rest = data.draw(st.sampled_from(SAVED))
    for _ in range(data.draw(st.integers(0, 2))):
        index = edited_json(data, index)
    rest = edited_bytes(data, rest)
    text = edited_bytes(data, json.dumps(index).encode()) if data.draw(st.booleans()) else None
    text = json.dumps(index).encode() if text is None else text
    length = len(text) if data.draw(st.integers(0, 3)) else edited(data, len(text), 8)
    body = struct.pack("<8sQ", b"RRCACHE1", length) + text + rest
    path = FOLDER / "edited"
    path.write_bytes(body + hashlib.blake2b(body, digest_size=32).digest())
    with bounded(len(body)):
        loaded = RoutingCache.load(path)
        loaded.match([1, 2, 3, 4, 5], {1, 2})
        loaded.save(FOLDER / "again")
        loaded.evict(1 << 40)
        assert loaded.held_bytes() == 0


def saved(layout: RowLayout, folder: Path) -> tuple[object, bytes]:
    path = folder / "saved"
    filled(layout).save(path)
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content, 8)
    return json.loads(content[16 : 16 + length]), content[16 + length : -32]


@pytest.fixture(autouse=True, scope="module")
def _files(tmp_path_factory: pytest.TempPathFactory) -> None:
    global FOLDER
    FOLDER = tmp_path_factory.mktemp("files")
    SAVED.extend(saved(layout, FOLDER) for layout in (TOY, WIDE))


FOLDER = Path()
SAVED: list[tuple[object, bytes]] = []


# Replies

ROWS = random_rows(np.random.default_rng(3), 9, TOY)
DESCRS = ["|u1", "|i1", "<u2", "<i2", "<i4", "<i8", ">i4", "<u8", "<f4", "|b1", "|O", "<U5", "|V8"]


def npy_file(data: st.DataObject) -> bytes:
    descr = data.draw(st.sampled_from(DESCRS))
    shape = [edited(data, n, 5) if data.draw(st.integers(0, 3)) == 0 else n for n in (9, 3, 2)]
    shape = shape[: data.draw(st.integers(0, 3))] if data.draw(st.integers(0, 3)) == 0 else shape
    order = data.draw(st.sampled_from(["False", "False", "True", "0"]))
    text = f"{{'descr': '{descr}', 'fortran_order': {order}, 'shape': ({str(shape)[1:-1]},), }}\n"
    size = len(text) if data.draw(st.integers(0, 3)) else edited(data, len(text), 2)
    content = ROWS.astype(descr).tobytes() if descr[1] in "iu" else ROWS.tobytes()
    version = data.draw(st.sampled_from([1, 1, 2, 3]))
    length = struct.pack("<H", size) if version == 1 else struct.pack("<I", size)
    return b"\x93NUMPY" + bytes([version, 0]) + length + text.encode() + edited_bytes(data, content)


@fuzzed
@given(st.data())
def test_npy_files_with_edited_headers(data: st.DataObject) -> None:
    file = npy_file(data)
    with bounded(len(file)):
        array = read_npy(file, 1 << 20)
        assert array.dtype.kind in "iu"
        assert array.nbytes <= len(file)
        read_rows(array, TOY, num_tokens=10, requested_start=0)


FORMS = st.builds(
    EngineForm,
    st.sampled_from(["int8", "int16", "int32", "int64", "uint8", "uint16"]),
    st.sampled_from([0, 1, 3, 4]),
    st.booleans(),
    st.booleans(),
)


@fuzzed
@given(st.data())
def test_flat_bytes_under_any_form_and_any_counts(data: st.DataObject) -> None:
    form = data.draw(st.none() | FORMS)
    dtype = data.draw(st.sampled_from(["int8", "int32", "uint8", "uint16"]))
    block = edited_bytes(data, ROWS.astype(form.dtype if form else dtype).tobytes())
    num_tokens = edited(data, 10, 4) if data.draw(st.booleans()) else 10
    start = edited(data, 0, 4, signed=True) if data.draw(st.booleans()) else 0
    with bounded(len(block)):
        read = read_flat(
            block,
            TOY,
            num_tokens=num_tokens,
            requested_start=start,
            dtype=dtype,  # type: ignore[arg-type]
            form=form,
        )
        assert read.rows.shape[1:] == (3, 2)
        assert read.rows.dtype == TOY.dtype
        assert read.start + len(read.rows) == num_tokens - 1


def real_reply(data: st.DataObject) -> object:
    import base64

    flat = base64.b64encode(ROWS.astype("<i4").tobytes()).decode()
    file = base64.b64encode(npy_file(data)).decode()
    return data.draw(
        st.sampled_from(
            [
                {"meta_info": {"routed_experts": flat}, "text": ""},
                {"choices": [{"meta_info": {}}], "sglext": {"routed_experts": flat}},
                {"routed_experts": file},
                {"prompt_routed_experts": file, "routed_experts": ROWS[:4].tolist()},
                {"routed_experts": ROWS.tolist()},
            ]
        )
    )


@fuzzed
@given(st.data())
def test_replies_with_edited_fields(data: st.DataObject) -> None:
    reply = real_reply(data)
    for _ in range(data.draw(st.integers(0, 3))):
        reply = edited_json(data, reply)
    for read in (read_sglang, read_vllm):
        with bounded(4096):
            found = read(reply, TOY, num_tokens=10, requested_start=0, max_bytes=1 << 20)  # type: ignore[arg-type]
            assert (found.rows.shape, found.start) == ((9, 3, 2), 0)
            assert found.rows.dtype == TOY.dtype
