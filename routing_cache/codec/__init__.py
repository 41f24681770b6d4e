"""Encodings of routing rows for the wire and for cold storage.

=========== ======= ============================= ==========================================
encoding    order   size (8 of 128, of uint8)     use
=========== ======= ============================= ==========================================
raw         kept    1                             inside one machine
bits        kept    0.875 (6 to 9 bits by E)      the wire
elias_fano  lost    0.75                          cold storage where only the set matters
delta       kept    0.01 to 0.1                   a second answer for the same tokens
=========== ======= ============================= ==========================================
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from routing_cache.codec import bits, delta, elias_fano, raw
from routing_cache.codec.header import Checksum, Header, read_header
from routing_cache.digest import rows_digest
from routing_cache.errors import CodecError, DigestMismatchError
from routing_cache.layout import (
    Mask,
    RowLayout,
    Rows,
    TokenIds,
    as_token_ids,
)
from routing_cache.row_check import check_rows

Encoding = Literal["raw", "bits", "elias_fano", "delta"]
DEFAULT_MAX_BYTES = 4 << 30


class _Codec(NamedTuple):
    number: int
    ordered: bool
    needs_valid: bool  # cannot express the missing mark: missing rows go to a bitmap
    encode: Callable[[Rows, RowLayout], bytes]
    decode: Callable[[memoryview, int, RowLayout], Rows]


ENCODINGS: dict[str, _Codec] = {
    "raw": _Codec(0, True, False, raw.encode, raw.decode),
    "bits": _Codec(1, True, True, bits.encode, bits.decode),
    "elias_fano": _Codec(2, False, True, elias_fano.encode, elias_fano.decode),
}
_DELTA = 3
_BY_NUMBER = {codec.number: codec for codec in ENCODINGS.values()}


@dataclass(frozen=True)
class Decoded:
    """Decoded rows ``[T, L, K]`` and their header."""

    rows: Rows
    header: Header

    def verify(self, token_ids: TokenIds) -> None:
        """Check that the rows belong to these tokens ``[T]`` and the header's weight version.

        Raises:
            DigestMismatchError: they do not, or the block was encoded without token ids.
        """
        if self.header.digest is None:
            raise DigestMismatchError("this block was encoded without token ids")
        ids = as_token_ids(token_ids)
        if len(ids) != len(self.rows):
            raise DigestMismatchError("another length", got=len(ids), expected=len(self.rows))
        header = self.header
        found = rows_digest(
            self.rows,
            header.layout,
            ids,
            start=header.start,
            weight_version=header.weight_version,
        )
        if found != self.header.digest:
            raise DigestMismatchError(
                "rows, token ids and weight version do not belong together",
                got=f"{found:#x}",
                expected=f"{self.header.digest:#x}",
            )


def encode(
    rows: Rows,
    layout: RowLayout,
    encoding: Encoding = "raw",
    *,
    start: int = 0,
    weight_version: int = 0,
    token_ids: TokenIds | None = None,
    base: Rows | None = None,
    checksum: Checksum = "fast",
) -> bytes:
    """Encode canonical ``rows`` ``[T, L, K]``; missing rows stay missing.

    Args:
        start: absolute index of the first row.
        token_ids: ``[T]`` of the rows' tokens, to bind them into the digest.
        base: rows of the same tokens, for ``delta`` only.
        checksum: ``blake2b`` where data leaves for storage.

    Raises:
        CodecError: bad rows in a bit-level encoding, or a missing or needless ``base``.
    """
    block = np.ascontiguousarray(layout.canonical(rows))
    if checksum not in ("fast", "blake2b"):
        raise CodecError("unknown checksum", got=checksum, expected="'fast' or 'blake2b'")
    if (encoding == "delta") != (base is not None):
        raise CodecError("base goes with the delta encoding", got=encoding)
    has_bitmap = False
    if encoding == "delta":
        assert base is not None
        number, ordered, payload = _DELTA, True, delta.encode(block, layout, layout.canonical(base))
    elif encoding in ENCODINGS:
        codec = ENCODINGS[encoding]
        number, ordered = codec.number, codec.ordered
        has_bitmap, payload = _encode_present(block, layout, codec)
    else:
        raise CodecError("unknown encoding", got=encoding, expected=[*ENCODINGS, "delta"])
    decoded = block if ordered else elias_fano.sort_sets(block)
    digest = None
    if token_ids is not None:
        ids = as_token_ids(token_ids)
        if len(ids) != len(block):
            raise CodecError("token_ids do not fit the rows", got=len(ids), expected=len(block))
        digest = rows_digest(decoded, layout, ids, start=start, weight_version=weight_version)
    header = Header(
        encoding=number,
        ordered=ordered,
        has_bitmap=has_bitmap,
        checksum=checksum,
        layout=layout,
        num_rows=len(block),
        start=start,
        weight_version=weight_version,
        payload_bytes=len(payload),
        digest=digest,
        content_hash=_content_hash(checksum, payload, decoded, layout),
    )
    return header.pack() + payload


def decode(
    data: bytes | memoryview,
    *,
    layout: RowLayout | None = None,
    base: Rows | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Decoded:
    """Decode one block. Memory stays below ``max_bytes`` plus a few times the input's size.

    Args:
        layout: the model the rows must belong to; None takes the header's word.
        base: for ``delta``, the rows it was encoded against.
        max_bytes: bound on the decoded rows.

    Raises:
        CodecError: truncated, foreign, damaged, too large, or of another model.
    """
    view = memoryview(data).cast("B")
    header, at = read_header(view)
    if layout is not None and layout != header.layout:
        raise CodecError("rows of another model", got=header.layout, expected=layout)
    size = header.num_rows * header.layout.row_bytes
    if size > max_bytes:
        raise CodecError("too many rows", got=f"{size} bytes", expected=f"at most {max_bytes}")
    payload = view[at:]
    if len(payload) != header.payload_bytes:
        raise CodecError(
            "the payload is cut short or too long", got=len(payload), expected=header.payload_bytes
        )
    if header.encoding == _DELTA:
        if base is None:
            raise CodecError("a delta needs its base", fix="pass base=")
        rows = delta.decode(payload, header.num_rows, header.layout, base)
    elif header.encoding in _BY_NUMBER:
        rows = _decode_present(payload, header, _BY_NUMBER[header.encoding])
    else:
        raise CodecError("unknown encoding", got=header.encoding)
    found = _content_hash(header.checksum, payload, rows, header.layout)
    if found != header.content_hash:
        raise CodecError(
            "the rows are damaged",
            got=found.hex(),
            expected=header.content_hash.hex(),
            fix="fetch the block again",
        )
    return Decoded(rows, header)


def _encode_present(block: Rows, layout: RowLayout, codec: _Codec) -> tuple[bool, bytes]:
    if not codec.needs_valid:
        return False, codec.encode(block, layout)
    check = check_rows(block, layout)
    if check.bad is not None:
        raise CodecError(
            "bad rows cannot be encoded",
            got=check.num_bad,
            fix="record them first: the cache marks bad rows missing",
        )
    if check.missing is None:
        return False, codec.encode(block, layout)
    present = ~check.missing
    bitmap = np.packbits(present, bitorder="little").tobytes()
    return True, bitmap + codec.encode(block[present], layout)


def _decode_present(payload: memoryview, header: Header, codec: _Codec) -> Rows:
    if not header.has_bitmap:
        return codec.decode(payload, header.num_rows, header.layout)
    cut = (header.num_rows + 7) // 8
    if len(payload) < cut:
        raise CodecError("the presence bitmap is cut short", got=len(payload), expected=cut)
    bits = np.unpackbits(np.frombuffer(payload[:cut], np.uint8), bitorder="little")
    if bits[header.num_rows :].any():
        raise CodecError("the padding of the presence bitmap is not zero")
    present: Mask = bits[: header.num_rows].astype(np.bool_)
    known = codec.decode(payload[cut:], int(np.count_nonzero(present)), header.layout)
    rows = np.full((header.num_rows, *known.shape[1:]), header.layout.missing, header.layout.dtype)
    rows[present] = known
    return rows


def _content_hash(
    checksum: Checksum, payload: bytes | memoryview, rows: Rows, layout: RowLayout
) -> bytes:
    if checksum == "blake2b":
        return hashlib.blake2b(payload, digest_size=16).digest()
    return rows_digest(rows, layout).to_bytes(16, "little")


__all__ = ["ENCODINGS", "Checksum", "Decoded", "Encoding", "Header", "decode", "encode"]
