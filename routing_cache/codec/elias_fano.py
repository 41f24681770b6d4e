"""Elias-Fano sets: the K ids of a (token, layer) sorted ascending. The router's order is lost.

The low bits of each id are stored as they are, the high bits in unary (Elias 1974, Fano 1971):
8 of 128 experts take 48 bits, 0.75 of uint8; log2 C(128, 8) is 40.4. Where the unary part fits
16 bits a table of all 65,536 codes decodes it in one look-up.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from routing_cache.codec.bits import ids_bytes, pack_ids, unpack_ids
from routing_cache.errors import CodecError
from routing_cache.layout import RowLayout, Rows

_CHUNK_SETS = 1 << 14


def _low_bits(layout: RowLayout) -> int:
    return max(0, (layout.num_experts // layout.moe_top_k).bit_length() - 1)


def _unary_bits(layout: RowLayout) -> int:
    return layout.moe_top_k + ((layout.num_experts - 1) >> _low_bits(layout))


def _unary_bytes(layout: RowLayout) -> int:
    return (_unary_bits(layout) + 7) // 8


def sort_sets(rows: Rows) -> Rows:
    """Sort the ids of each set, as this encoding gives them back."""
    return np.sort(rows, axis=2)


def encode(rows: Rows, layout: RowLayout) -> bytes:
    """Encode ``rows`` ``[T, L, K]``, all present and valid, as sets."""
    low = _low_bits(layout)
    k = layout.moe_top_k
    num_sets = rows.shape[0] * rows.shape[1]
    sets = sort_sets(rows).reshape(num_sets, k)
    unary = np.empty((num_sets, _unary_bytes(layout)), np.uint8)
    slot = np.arange(k, dtype=np.int64)
    for at in range(0, num_sets, _CHUNK_SETS):
        part = sets[at : at + _CHUNK_SETS]
        bits = np.zeros((len(part), 8 * unary.shape[1]), np.bool_)
        np.put_along_axis(bits, (part >> low).astype(np.int64) + slot, True, axis=1)
        unary[at : at + len(part)] = np.packbits(bits, axis=1, bitorder="little")
    mask = sets.dtype.type((1 << low) - 1)
    lows = b"" if low == 0 else pack_ids((sets & mask).reshape(-1), low)
    return unary.tobytes() + lows


def decode(payload: memoryview, num_rows: int, layout: RowLayout) -> Rows:
    """Invert :func:`encode`; refuses codes that are no set of K experts."""
    low = _low_bits(layout)
    k = layout.moe_top_k
    num_sets = num_rows * layout.num_moe_layers
    cut = num_sets * _unary_bytes(layout)
    expected = cut + (ids_bytes(num_sets * k, low) if low else 0)
    if len(payload) != expected:
        raise CodecError("sets of another size", got=len(payload), expected=expected)
    unary = np.frombuffer(payload[:cut], np.uint8).reshape(num_sets, _unary_bytes(layout))
    sets = _decode_unary(unary, layout).astype(layout.dtype, copy=False)
    if low:
        sets = (sets << sets.dtype.type(low)) if not _pre_shifted(layout) else sets
        lows = unpack_ids(payload[cut:], num_sets * k, low).reshape(num_sets, k)
        sets |= lows.astype(layout.dtype, copy=False)
    if num_sets and (
        int(sets[:, -1].max()) >= layout.num_experts or (k > 1 and not _ascending(sets))
    ):
        raise CodecError("a code is no set of experts", expected=f"{k} of {layout.num_experts}")
    return sets.reshape(num_rows, layout.num_moe_layers, k)


def _ascending(sets: NDArray[np.unsignedinteger]) -> bool:
    flat = sets.reshape(-1)
    rising = np.empty(len(flat), np.bool_)
    np.less(flat[:-1], flat[1:], out=rising[:-1])
    # The last id of a set may be above the next set's first.
    rising[sets.shape[1] - 1 :: sets.shape[1]] = True
    return bool(rising.all())


def _pre_shifted(layout: RowLayout) -> bool:
    return _unary_bytes(layout) == 2 and layout.moe_top_k <= 8 and layout.dtype.itemsize == 1


def _decode_unary(unary: NDArray[np.uint8], layout: RowLayout) -> NDArray[np.unsignedinteger]:
    """High parts ``[N, K]`` of ``N`` unary codes."""
    k = layout.moe_top_k
    if unary.shape[1] == 2 and k <= 8:
        codes = unary.view("<u2").reshape(-1)
        shift = _low_bits(layout) if _pre_shifted(layout) else 0
        table, valid = _table(k, shift)
        if not valid[codes].all():
            raise CodecError("a unary code has the wrong number of ones", expected=k)
        return table[codes].view(np.uint8).reshape(-1, 8)[:, :k]
    highs = np.empty((len(unary), k), np.uint16)
    slot = np.arange(k, dtype=np.int64)
    for at in range(0, len(unary), _CHUNK_SETS):
        bits = np.unpackbits(unary[at : at + _CHUNK_SETS], axis=1, bitorder="little")
        if not (bits.sum(axis=1) == k).all():
            raise CodecError("a unary code has the wrong number of ones", expected=k)
        highs[at : at + len(bits)] = np.nonzero(bits)[1].reshape(-1, k) - slot
    return highs


@lru_cache(maxsize=8)
def _table(k: int, shift: int) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """High parts of every 16-bit code as eight byte lanes, and which codes have K ones."""
    codes = np.arange(1 << 16, dtype="<u2")
    bits = np.unpackbits(codes.view(np.uint8).reshape(-1, 2), axis=1, bitorder="little")
    valid = bits.sum(axis=1) == k
    lanes = np.zeros((1 << 16, 8), np.uint8)
    places = np.nonzero(bits[valid])[1].reshape(-1, k)
    lanes[valid, :k] = (places - np.arange(k)) << shift
    return lanes.view(np.uint64).reshape(-1), valid
