"""Raw rows: the dtype's bytes, little-endian. Order kept; no cost to decode."""

from __future__ import annotations

import numpy as np

from routing_cache.errors import CodecError
from routing_cache.layout import RowLayout, Rows


def encode(rows: Rows, layout: RowLayout) -> bytes:
    """Encode ``rows`` ``[T, L, K]`` as they are."""
    return rows.astype(layout.dtype.newbyteorder("<"), copy=False).tobytes()


def decode(payload: memoryview, num_rows: int, layout: RowLayout) -> Rows:
    """Invert :func:`encode`."""
    expected = num_rows * layout.row_bytes
    if len(payload) != expected:
        raise CodecError("raw rows of another size", got=len(payload), expected=expected)
    shape = (num_rows, layout.num_moe_layers, layout.moe_top_k)
    flat = np.frombuffer(payload, layout.dtype.newbyteorder("<"))
    return flat.astype(layout.dtype).reshape(shape)
