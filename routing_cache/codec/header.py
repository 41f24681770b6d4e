"""The self-describing header in front of every encoded block of rows.

Little-endian throughout. The header carries its own CRC, so a damaged field is noticed before any
size in it is believed; the content hash covers the rows themselves.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Literal

from routing_cache.errors import CodecError, LayoutError
from routing_cache.layout import MAX_LAYERS, RowLayout, check_size

Checksum = Literal["fast", "blake2b"]

_MAGIC = b"RRX1"
_FORMAT_VERSION = 1
# magic, format, byte order, encoding, flags, itemsize, rows, start, version, hidden layers,
# MoE layers, experts, K, payload bytes, bound digest, content hash
_FIXED = struct.Struct("<4sBcBBBxxxIIqIIIIQQ16s")
_CRC = struct.Struct("<I")

FLAG_ORDERED = 1
FLAG_BITMAP = 2  # a presence bitmap leads the payload, missing rows are left out
FLAG_BOUND = 4  # the digest field binds token ids, version and rows
FLAG_BLAKE2B = 8
_ALL_FLAGS = FLAG_ORDERED | FLAG_BITMAP | FLAG_BOUND | FLAG_BLAKE2B


@dataclass(frozen=True)
class Header:
    """Description that leads an encoded block."""

    encoding: int  # key of ``codec.ENCODINGS``
    ordered: bool  # False: ids come back ascending, the router's order is lost
    has_bitmap: bool
    checksum: Checksum
    layout: RowLayout
    num_rows: int
    start: int  # absolute index of the first row
    weight_version: int
    payload_bytes: int
    digest: int | None  # over weight version, token ids and the rows as they decode
    content_hash: bytes  # 16 bytes

    def pack(self) -> bytes:
        flags = FLAG_ORDERED * self.ordered | FLAG_BITMAP * self.has_bitmap
        flags |= FLAG_BOUND * (self.digest is not None)
        flags |= FLAG_BLAKE2B * (self.checksum == "blake2b")
        layout = self.layout
        check_size(layout)
        if not (0 <= self.start < 1 << 32 and -(1 << 63) <= self.weight_version < 1 << 63):
            raise CodecError(
                "start or weight_version does not fit the header",
                got=(self.start, self.weight_version),
                expected="32 bits without a sign, 64 bits with one",
            )
        fixed = _FIXED.pack(
            _MAGIC,
            _FORMAT_VERSION,
            b"<",
            self.encoding,
            flags,
            layout.dtype.itemsize,
            self.num_rows,
            self.start,
            self.weight_version,
            layout.num_hidden_layers,
            layout.num_moe_layers,
            layout.num_experts,
            layout.moe_top_k,
            self.payload_bytes,
            self.digest or 0,
            self.content_hash,
        )
        body = fixed + _layer_map(layout)
        return body + _CRC.pack(zlib.crc32(body))


def _layer_map(layout: RowLayout) -> bytes:
    bits = bytearray((layout.num_hidden_layers + 7) // 8)
    for layer in layout.moe_layers:
        bits[layer // 8] |= 1 << layer % 8
    return bytes(bits)


def read_header(data: memoryview) -> tuple[Header, int]:
    """Read the header at the front of ``data``; returns it and where the payload begins.

    Raises:
        CodecError: foreign, truncated, of another format version, or damaged.
    """
    if len(data) < _FIXED.size or bytes(data[:4]) != _MAGIC:
        raise CodecError("these are not encoded routing rows", got=bytes(data[:4]), expected=_MAGIC)
    fields = _FIXED.unpack_from(data)
    _, version, order, encoding, flags, itemsize, num_rows, start, weight_version = fields[:9]
    hidden, num_moe, experts, top_k, payload_bytes, digest, content_hash = fields[9:]
    if version != _FORMAT_VERSION or order != b"<":
        raise CodecError(
            "unknown format version or byte order",
            got=(version, order),
            expected=(_FORMAT_VERSION, b"<"),
            fix="decode with the release that wrote it",
        )
    if not 0 < hidden <= MAX_LAYERS or flags & ~_ALL_FLAGS:
        raise CodecError("impossible header", got=f"{hidden} layers, flags {flags:#x}")
    end = _FIXED.size + (hidden + 7) // 8
    if len(data) < end + _CRC.size:
        raise CodecError("the header is cut short", got=len(data), expected=end + _CRC.size)
    if zlib.crc32(data[:end]) != _CRC.unpack_from(data, end)[0]:
        raise CodecError("the header is damaged", fix="fetch the block again")
    layer_map = data[_FIXED.size : end]
    layers = tuple(i for i in range(hidden) if layer_map[i // 8] >> i % 8 & 1)
    try:
        layout = RowLayout(hidden, layers, experts, top_k)
    except LayoutError as error:
        raise CodecError(f"the header names an impossible model: {error}") from error
    if layout.num_moe_layers != num_moe or layout.dtype.itemsize != itemsize:
        raise CodecError("the header contradicts itself", got=(num_moe, itemsize))
    check_size(layout)
    header = Header(
        encoding=encoding,
        ordered=bool(flags & FLAG_ORDERED),
        has_bitmap=bool(flags & FLAG_BITMAP),
        checksum="blake2b" if flags & FLAG_BLAKE2B else "fast",
        layout=layout,
        num_rows=num_rows,
        start=start,
        weight_version=weight_version,
        payload_bytes=payload_bytes,
        digest=digest if flags & FLAG_BOUND else None,
        content_hash=content_hash,
    )
    return header, end + _CRC.size
