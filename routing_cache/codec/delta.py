"""Delta against other rows for the same tokens: which sets changed, and the ids that did.

For a second answer under another weight version, or prefilled instead of decoded, most sets are
the same. The payload holds, for each changed set, its distance from the last one (a byte, 255
continues), a K-bit mask of the ids that differ, and those ids. Order kept. The base is named by
its digest and must be at hand to decode.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from routing_cache.digest import rows_digest
from routing_cache.errors import CodecError
from routing_cache.layout import RowLayout, Rows

_PREFIX = struct.Struct("<QII")  # digest of the base, changed sets, gap bytes
_ESCAPE = 255


def encode(rows: Rows, layout: RowLayout, base: Rows) -> bytes:
    """Encode ``rows`` as changes to ``base``, both ``[T, L, K]``."""
    if rows.shape != base.shape:
        raise CodecError("the base has another shape", got=base.shape, expected=rows.shape)
    k = layout.moe_top_k
    new, old = rows.reshape(-1, k), base.reshape(-1, k)
    differs = new != old
    changed = np.flatnonzero(differs.any(axis=1))
    gaps = _encode_gaps(np.diff(changed, prepend=-1) - 1)
    masks = np.packbits(differs[changed], axis=1, bitorder="little")
    ids = new[differs].astype(layout.dtype.newbyteorder("<"))
    prefix = _PREFIX.pack(rows_digest(base, layout), len(changed), len(gaps))
    return prefix + gaps.tobytes() + masks.tobytes() + ids.tobytes()


def decode(payload: memoryview, num_rows: int, layout: RowLayout, base: Rows) -> Rows:
    """Invert :func:`encode`; refuses another base."""
    k = layout.moe_top_k
    if base.shape != (num_rows, layout.num_moe_layers, k) or base.dtype != layout.dtype:
        raise CodecError(
            "the base has another shape or dtype",
            got=f"{base.dtype} {base.shape}",
            expected=f"{layout.dtype} {(num_rows, layout.num_moe_layers, k)}",
        )
    if len(payload) < _PREFIX.size:
        raise CodecError("a delta is cut short", got=len(payload))
    digest, num_changed, num_gap_bytes = _PREFIX.unpack_from(payload)
    if digest != rows_digest(base, layout):
        raise CodecError(
            "this delta belongs to another base", fix="pass the rows it was encoded against"
        )
    mask_bytes = (k + 7) // 8
    gaps_end = _PREFIX.size + num_gap_bytes
    masks_end = gaps_end + num_changed * mask_bytes
    if masks_end > len(payload) or num_gap_bytes < num_changed:
        raise CodecError("a delta is cut short", got=len(payload), expected=masks_end)
    changed = _decode_gaps(np.frombuffer(payload[_PREFIX.size : gaps_end], np.uint8), num_changed)
    num_sets = num_rows * layout.num_moe_layers
    if num_changed and int(changed[-1]) >= num_sets:
        raise CodecError("a delta reaches past its base", got=int(changed[-1]), expected=num_sets)
    masks = np.frombuffer(payload[gaps_end:masks_end], np.uint8).reshape(num_changed, mask_bytes)
    bits = np.unpackbits(masks, axis=1, bitorder="little").astype(np.bool_)
    if bits[:, k:].any():
        raise CodecError("a delta's mask has more bits than experts", expected=k)
    differs = bits[:, :k]
    num_ids = int(np.count_nonzero(differs))
    if len(payload) != masks_end + num_ids * layout.dtype.itemsize:
        raise CodecError("a delta has the wrong number of ids", got=len(payload) - masks_end)
    rows = base.reshape(-1, k).copy()
    part = rows[changed]
    part[differs] = np.frombuffer(payload[masks_end:], layout.dtype.newbyteorder("<"))
    rows[changed] = part
    return rows.reshape(base.shape)


def _encode_gaps(gaps: NDArray[np.int64]) -> NDArray[np.uint8]:
    escapes = gaps // _ESCAPE
    out = np.full(len(gaps) + int(escapes.sum()), _ESCAPE, np.uint8)
    out[np.cumsum(escapes + 1) - 1] = gaps % _ESCAPE
    return out


def _decode_gaps(data: NDArray[np.uint8], count: int) -> NDArray[np.int64]:
    last = data != _ESCAPE
    if int(np.count_nonzero(last)) != count or (len(data) and not last[-1]):
        raise CodecError("a delta's gaps are damaged", got=int(np.count_nonzero(last)))
    return np.cumsum(data, dtype=np.int64)[last] + np.arange(count)
