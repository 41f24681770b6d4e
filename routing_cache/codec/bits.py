"""Bit packing: each id in as few bits as the number of experts needs. Order kept.

128 experts take 7 bits, 0.875 of uint8; 512 take 9, 0.5625 of uint16. Eight ids are packed at a
time inside one 64-bit word with three shift-and-mask folds.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from routing_cache.errors import CodecError
from routing_cache.layout import RowLayout, Rows
from routing_cache.row_check import check_rows

_LANES = 8
_CHUNK_WORDS = 1 << 15


def id_bits(num_experts: int) -> int:
    """Bits that an id in ``[0, num_experts)`` needs; at least 1."""
    return max(1, (num_experts - 1).bit_length())


def packed_bytes(num_ids: int, width: int) -> int:
    """Size of ``num_ids`` ids of ``width`` bits, padded to whole groups of eight ids."""
    return (num_ids + _LANES - 1) // _LANES * width


def _fold_masks(width: int) -> list[tuple[np.uint64, np.uint64, np.uint64]]:
    """(low half mask, high half mask, shift) of the three folds for 8-bit lanes of ``width``."""
    masks: list[tuple[np.uint64, np.uint64, np.uint64]] = []
    for half in (8, 16, 32):
        used = width * half // 8
        low = sum(((1 << used) - 1) << at for at in range(0, 64, 2 * half))
        masks.append((np.uint64(low), np.uint64(low << half), np.uint64(half - used)))
    return masks


def pack_lanes(ids: NDArray[np.uint8], width: int) -> bytes:
    """Pack a flat uint8 array whose values are below ``2**width``, ``1 <= width <= 8``."""
    padded = np.zeros((len(ids) + _LANES - 1) // _LANES * _LANES, np.uint8)
    padded[: len(ids)] = ids
    if width == 8:
        return padded.tobytes()
    words = padded.view("<u8")
    packed = np.empty((len(words), width), np.uint8)
    folds = _fold_masks(width)
    for at in range(0, len(words), _CHUNK_WORDS):
        part = words[at : at + _CHUNK_WORDS].astype(np.uint64)
        for low, high, shift in folds:
            part = (part & low) | ((part & high) >> shift)
        packed[at : at + len(part)] = part.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width]
    return packed.tobytes()


def unpack_lanes(payload: memoryview, num_ids: int, width: int) -> NDArray[np.uint8]:
    """Invert :func:`pack_lanes`."""
    expected = packed_bytes(num_ids, width)
    if len(payload) != expected:
        raise CodecError("packed ids of another size", got=len(payload), expected=expected)
    packed = np.frombuffer(payload, np.uint8)
    if width == 8:
        return _without_padding(packed, num_ids)
    packed = packed.reshape(-1, width)
    out = np.empty((len(packed), _LANES), np.uint8)
    folds = _fold_masks(width)
    for at in range(0, len(packed), _CHUNK_WORDS):
        piece = packed[at : at + _CHUNK_WORDS]
        wide = np.zeros((len(piece), 8), np.uint8)
        wide[:, :width] = piece
        part = wide.reshape(-1).view("<u8").astype(np.uint64)
        for low, high, shift in reversed(folds):
            part = (part & low) | ((part << shift) & high)
        out[at : at + len(part)] = part.astype("<u8").view(np.uint8).reshape(-1, 8)
    return _without_padding(out.reshape(-1), num_ids)


def _without_padding(ids: NDArray[np.uint8], num_ids: int) -> NDArray[np.uint8]:
    """Cut off the padding, which must be zero so that damage in any bit shows."""
    if ids[num_ids:].any():
        raise CodecError("the padding behind packed ids is not zero")
    return ids[:num_ids]


def pack_ids(ids: NDArray[np.unsignedinteger], width: int) -> bytes:
    """Pack flat ids of 1 to 16 bits: a plane of low bytes, then one of the bits above."""
    if width <= 8:
        return pack_lanes(ids.astype(np.uint8, copy=False), width)
    low = pack_lanes((ids & 0xFF).astype(np.uint8), 8)
    return low + pack_lanes((ids >> 8).astype(np.uint8), width - 8)


def unpack_ids(payload: memoryview, num_ids: int, width: int) -> NDArray[np.unsignedinteger]:
    """Invert :func:`pack_ids`: uint8 up to 8 bits, else uint16."""
    if width <= 8:
        return unpack_lanes(payload, num_ids, width)
    cut = packed_bytes(num_ids, 8)
    low = unpack_lanes(payload[:cut], num_ids, 8).astype(np.uint16)
    high = unpack_lanes(payload[cut:], num_ids, width - 8).astype(np.uint16)
    return low | (high << np.uint16(8))


def ids_bytes(num_ids: int, width: int) -> int:
    """Size of :func:`pack_ids`."""
    if width <= 8:
        return packed_bytes(num_ids, width)
    return packed_bytes(num_ids, 8) + packed_bytes(num_ids, width - 8)


def encode(rows: Rows, layout: RowLayout) -> bytes:
    """Pack ``rows`` ``[T, L, K]``, all present, in :func:`id_bits` bits per id."""
    return pack_ids(rows.reshape(-1), id_bits(layout.num_experts))


def decode(payload: memoryview, num_rows: int, layout: RowLayout) -> Rows:
    """Invert :func:`encode`; refuses rows that no router can choose."""
    num_ids = num_rows * layout.num_moe_layers * layout.moe_top_k
    ids = unpack_ids(payload, num_ids, id_bits(layout.num_experts)).astype(layout.dtype, copy=False)
    rows = ids.reshape(num_rows, layout.num_moe_layers, layout.moe_top_k)
    check = check_rows(rows, layout)
    if not check.all_good:
        raise CodecError("ids are out of range or repeated", got=f"first at {check.first_bad}")
    return rows
