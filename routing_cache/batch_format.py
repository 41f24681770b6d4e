"""Bytes of a packed batch: tables in a checksummed header, then the payload.

The payload holds *atoms*: maximal runs of rows that the batch's samples use alike, each once. Every
size in the header is checked against what was received before anything is allocated for it.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from routing_cache.errors import CodecError, LayoutError
from routing_cache.layout import RowLayout, check_size
from routing_cache.provenance import Provenance, read_origins

Reader = Callable[[int, int], bytes | memoryview]  # (offset, num_bytes) of the packed block

_MAGIC = b"RRPACK1\n"
# magic, header bytes, payload bytes, blake2b-16 of the tables
_PREFIX = struct.Struct("<8sQQ16s")
# hidden layers, MoE layers, experts, K, digest key, with digests, blocks, atoms, samples, refs,
# tail tokens, origins JSON bytes
_COUNTS = struct.Struct("<IIIIQIIIIIII")
_ATOM_DTYPE = np.dtype(
    [("start", "<u4"), ("num_rows", "<u4"), ("origin", "<u4"), ("missing", "<u4")]
)
_SAMPLE_DTYPE = np.dtype([(n, "<u4") for n in ("num_tokens", "num_refs", "num_tail")])
_MAX_HEADER_BYTES = 1 << 30


@dataclass(frozen=True)
class Atom:
    """Rows stored once: ``num_rows`` from absolute token index ``start``."""

    start: int
    num_rows: int
    origin: Provenance
    has_missing: bool
    offset: int  # of its bytes in the payload
    digests: tuple[int, ...]  # one per layer block; empty without digests

    @property
    def stop(self) -> int:
        return self.start + self.num_rows


@dataclass(frozen=True)
class Sample:
    num_tokens: int
    atoms: tuple[int, ...]
    tail_tokens: bytes


@dataclass(frozen=True)
class Tables:
    layout: RowLayout
    digest_key: int
    with_digests: bool
    blocks: tuple[int, ...]  # L boundaries: 0, ..., L
    atoms: tuple[Atom, ...]
    samples: tuple[Sample, ...]

    @property
    def payload_bytes(self) -> int:
        return sum(atom.num_rows for atom in self.atoms) * self.layout.row_bytes


def check_blocks(layer_blocks: Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    blocks = (*(layer_blocks if layer_blocks is not None else (0,)), num_layers)
    if blocks[0] != 0 or any(a >= b for a, b in pairwise(blocks)):
        raise LayoutError(
            "layer_blocks must begin with 0 and ascend",
            got=tuple(layer_blocks or ()),
            expected=f"numbers below {num_layers}",
        )
    return blocks


def write_header(tables: Tables) -> bytes:
    layout = tables.layout
    origins = dict.fromkeys(atom.origin for atom in tables.atoms)
    numbers = {origin: number for number, origin in enumerate(origins)}
    names = json.dumps(list(origins)).encode()
    atoms = np.array(
        [(a.start, a.num_rows, numbers[a.origin], a.has_missing) for a in tables.atoms],
        _ATOM_DTYPE,
    )
    samples = np.array(
        [(s.num_tokens, len(s.atoms), len(s.tail_tokens) // 4) for s in tables.samples],
        _SAMPLE_DTYPE,
    )
    refs = np.array([n for s in tables.samples for n in s.atoms], "<u4")
    digests = np.array([d for a in tables.atoms for d in a.digests], "<u8")
    tails = b"".join(s.tail_tokens for s in tables.samples)
    body = (
        _COUNTS.pack(
            layout.num_hidden_layers,
            layout.num_moe_layers,
            layout.num_experts,
            layout.moe_top_k,
            tables.digest_key,
            tables.with_digests,
            len(tables.blocks) - 1,
            len(atoms),
            len(samples),
            len(refs),
            len(tails) // 4,
            len(names),
        )
        + np.array(layout.moe_layers, "<u4").tobytes()
        + np.array(tables.blocks, "<u4").tobytes()
        + atoms.tobytes()
        + digests.tobytes()
        + samples.tobytes()
        + refs.tobytes()
        + tails
        + names
    )
    # Whole words before the payload let the receiver view it in place.
    body += b" " * (-(_PREFIX.size + len(body)) % 8)
    check = hashlib.blake2b(body, digest_size=16).digest()
    return _PREFIX.pack(_MAGIC, _PREFIX.size + len(body), tables.payload_bytes, check) + body


def read_header(read: Reader, num_bytes: int) -> tuple[bytes, int]:
    """Return the checked header, and the payload bytes that its prefix claims."""
    prefix = bytes(read(0, min(_PREFIX.size, num_bytes)))
    if len(prefix) < _PREFIX.size or not prefix.startswith(_MAGIC):
        raise CodecError("this is no packed batch", got=prefix[:8], expected=_MAGIC)
    _, header_bytes, payload_bytes, check = _PREFIX.unpack(prefix)
    if not _PREFIX.size + _COUNTS.size <= header_bytes <= min(num_bytes, _MAX_HEADER_BYTES):
        raise CodecError("the header is cut short", got=num_bytes, expected=header_bytes)
    body = bytes(read(_PREFIX.size, header_bytes - _PREFIX.size))
    if hashlib.blake2b(body, digest_size=16).digest() != check:
        raise CodecError("the header is damaged", fix="fetch the batch again")
    return prefix + body, payload_bytes


class _Cursor:
    """Takes arrays off the front of the header's tables, never past their end."""

    def __init__(self, body: memoryview) -> None:
        self._body = body

    def take(self, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        size = count * dtype.itemsize
        if size > len(self._body):
            raise CodecError("a table is cut short", got=len(self._body), expected=size)
        part, self._body = self._body[:size], self._body[size:]
        return np.frombuffer(part, dtype)


def parse_tables(header: bytes) -> Tables:
    counts = _COUNTS.unpack_from(header, _PREFIX.size)
    hidden, num_moe, experts, top_k, key, with_digests = counts[:6]
    num_blocks, num_atoms, num_samples, num_refs, num_tail, names_bytes = counts[6:]
    cursor = _Cursor(memoryview(header)[_PREFIX.size + _COUNTS.size :])
    word = np.dtype("<u4")
    moe_layers = tuple(cursor.take(num_moe, word).tolist())
    blocks = tuple(cursor.take(num_blocks + 1, word).tolist())
    atoms = cursor.take(num_atoms, _ATOM_DTYPE)
    digests = cursor.take(num_atoms * num_blocks if with_digests else 0, np.dtype("<u8"))
    samples = cursor.take(num_samples, _SAMPLE_DTYPE)
    refs = cursor.take(num_refs, word)
    tails = cursor.take(num_tail, np.dtype("<i4"))
    names = cursor.take(names_bytes, np.dtype("u1")).tobytes()
    try:
        layout = RowLayout(hidden, moe_layers, experts, top_k)
        check_size(layout)
        check_blocks(blocks[:-1], num_moe)
    except LayoutError as error:
        raise CodecError(f"the header names an impossible model: {error}") from error
    if blocks[-1:] != (num_moe,):
        raise CodecError("the layer blocks do not cover the model", got=blocks, expected=num_moe)
    try:
        origins = read_origins(json.loads(names))
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise CodecError(f"the provenance table is damaged: {error}") from error
    parsed = _parse_atoms(atoms, digests, origins, layout, num_blocks)
    return Tables(
        layout,
        key,
        bool(with_digests),
        blocks,
        parsed,
        _parse_samples(samples, refs, tails, parsed),
    )


def _parse_atoms(
    atoms: NDArray[Any],
    digests: NDArray[Any],
    origins: list[Provenance],
    layout: RowLayout,
    num_blocks: int,
) -> tuple[Atom, ...]:
    parsed: list[Atom] = []
    offset = 0
    table = cast("list[tuple[int, int, int, int]]", atoms.tolist())
    for number, (start, num_rows, origin, missing) in enumerate(table):
        if origin >= len(origins) or num_rows == 0:
            raise CodecError("an atom is damaged", got=(start, num_rows, origin))
        own = digests[number * num_blocks : (number + 1) * num_blocks].tolist()
        parsed.append(Atom(start, num_rows, origins[origin], bool(missing), offset, tuple(own)))
        offset += num_rows * layout.row_bytes
    return tuple(parsed)


def _parse_samples(
    samples: NDArray[Any], refs: NDArray[Any], tails: NDArray[Any], atoms: tuple[Atom, ...]
) -> tuple[Sample, ...]:
    parsed: list[Sample] = []
    at = at_tail = 0
    all_refs = cast("list[int]", refs.tolist())
    table = cast("list[tuple[int, int, int]]", samples.tolist())
    for num_tokens, num_refs, num_tail in table:
        own = tuple(all_refs[at : at + num_refs])
        tail = tails[at_tail : at_tail + num_tail]
        at, at_tail = at + num_refs, at_tail + num_tail
        position = 0
        for ref in own:
            if ref >= len(atoms) or atoms[ref].start != position:
                raise CodecError("a sample's rows do not follow each other", got=ref)
            position = atoms[ref].stop
        if len(own) != num_refs or len(tail) != num_tail or position + num_tail != num_tokens:
            raise CodecError("a sample's tables are cut short", got=(num_tokens, num_refs))
        parsed.append(Sample(num_tokens, own, tail.tobytes()))
    return tuple(parsed)
