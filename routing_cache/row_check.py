"""Which rows can be trusted: ids in range, K of them distinct in every layer.

Nearly every block is clean, so the question asked first is whether all of it is. A compiled kernel
answers it in one pass over the bytes; where it was not built, or does not know the model's K,
numpy does in K passes. Which rows are bad is found out afterwards, by one definition.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from routing_cache.routed_experts import Mask, RowLayout, Rows

try:
    from routing_cache import _kernel
except ImportError:  # no compiler where the package was installed
    _kernel = None

_KERNEL_TOP_K = (2, 4, 8)


class RowCheck(NamedTuple):
    """Outcome of :func:`check_rows`; a mask is None when no row has it."""

    bad: Mask | None  # [T] out-of-range or repeated ids
    missing: Mask | None  # [T] every id is the missing mark

    @property
    def num_bad(self) -> int:
        return 0 if self.bad is None else int(np.count_nonzero(self.bad))

    @property
    def num_missing(self) -> int:
        return 0 if self.missing is None else int(np.count_nonzero(self.missing))


_CLEAN = RowCheck(None, None)


def check_rows(rows: Rows, layout: RowLayout) -> RowCheck:
    """Which rows of a canonical ``[T, L, K]`` block cannot be trusted.

    A row is *missing* when all of its ids are the missing mark, *bad* when an id is out of range
    or a layer's K ids are not distinct. Dense layers are not in the block and so never judged.
    """
    if rows.size == 0:
        return _CLEAN
    if _surely_clean(rows, layout):
        return _CLEAN
    flat = rows.reshape(len(rows), -1)
    missing = (flat == layout.missing).all(axis=1)
    bad = (flat >= layout.num_experts).any(axis=1) & ~missing
    # Only rows in range can be judged by their ids; sorting puts equal ids side by side.
    candidates = np.flatnonzero(~(missing | bad))
    for part in np.array_split(candidates, max(1, len(candidates) // 4096)):
        ids = np.sort(rows[part], axis=2)
        bad[part] = (ids[:, :, 1:] == ids[:, :, :-1]).any(axis=(1, 2))
    return RowCheck(bad if bad.any() else None, missing if missing.any() else None)


def _surely_clean(rows: Rows, layout: RowLayout) -> bool:
    """Whether every row is good. False asks for the slow check."""
    if kernel_knows(rows, layout):
        return clean_by_kernel(rows, layout)
    return clean_by_numpy(rows, layout)


def kernel_knows(rows: Rows, layout: RowLayout) -> bool:
    """Whether the compiled kernel was built and judges such rows."""
    if _kernel is None or layout.moe_top_k not in _KERNEL_TOP_K:
        return False
    return rows.itemsize <= 2 and rows.flags.c_contiguous


def clean_by_kernel(rows: Rows, layout: RowLayout) -> bool:
    """Whether all ids are in range and every set's differ, in one pass over the bytes."""
    assert _kernel is not None
    return _kernel.all_rows_good(rows, rows.itemsize, layout.moe_top_k, layout.num_experts)


def clean_by_numpy(rows: Rows, layout: RowLayout) -> bool:
    """The same without a compiler, for any K and dtype."""
    highest = int(np.maximum.reduce(rows, axis=None))
    return highest < layout.num_experts and _surely_distinct(rows, layout)


class _Windows:
    """Buffers to compare every element of a flat chunk with its K-1 successors in one call."""

    def __init__(self, dtype: np.dtype[np.unsignedinteger], k: int) -> None:
        self.size = max(1, _WINDOW_BYTES // (k - 1) // dtype.itemsize // k) * k
        self.top_bit = 1 << (8 * dtype.itemsize - 1)
        self.parity = np.zeros(self.size, dtype)
        self.parity.reshape(-1, k)[1::2] = self.top_bit
        self.ids = np.zeros(self.size + k, dtype)
        # A bytearray, because its find() is a memchr: the fastest search for a zero byte.
        self.found = bytearray((k - 1) * self.size * dtype.itemsize)
        self.xor = np.frombuffer(self.found, dtype).reshape(k - 1, self.size)
        step = dtype.itemsize
        self.left = as_strided(self.ids, (k - 1, self.size), (0, step))
        self.right = as_strided(self.ids[1:], (k - 1, self.size), (step, step))

    def distinct(self, flat: NDArray[np.unsignedinteger], k: int) -> bool:
        """Whether the ids of each set of at most ``size`` elements differ."""
        count = len(flat)
        ids, xor, left, right = self.ids, self.xor, self.left, self.right
        np.bitwise_or(flat, self.parity[:count], out=ids[:count])
        # The elements behind the last set must look like the next one.
        ids[count : count + k] = self.top_bit if count // k % 2 else 0
        if count < self.size:
            xor, left, right = xor[:, :count], left[:, :count], right[:, :count]
        np.bitwise_xor(left, right, out=xor)
        if count == self.size and flat.itemsize == 1:
            return self.found.find(0) < 0
        return bool(np.minimum.reduce(xor, axis=None))


class _Scratch(threading.local):
    """Buffers that stay allocated: fresh ones cost more in page faults than the check."""

    def __init__(self) -> None:
        self.windows: dict[tuple[str, int], _Windows] = {}

    def get(self, dtype: np.dtype[np.unsignedinteger], k: int) -> _Windows:
        key = (dtype.str, k)
        if key not in self.windows:
            self.windows[key] = _Windows(dtype, k)
        return self.windows[key]


_scratch = _Scratch()
_WINDOW_BYTES = 7 << 16  # 64 KiB of rows at K=8: fits the second-level cache


def _surely_distinct(rows: Rows, layout: RowLayout) -> bool:
    """Whether all ids of every set differ; all ids are in range. False asks for the slow check.

    Works on the flat array, because a loop over K-wide rows would cost a hundred times more:
    element i is compared with elements i+1 to i+K-1. Comparisons that cross into the next set
    must not count, so every other set gets the dtype's top bit, which no id of a model with at
    most half the dtype's range uses; ids of other models are widened first.
    """
    k = layout.moe_top_k
    if k == 1:
        return True
    flat = rows.reshape(-1)
    dtype = rows.dtype
    if layout.num_experts > int(np.iinfo(dtype).max) // 2 + 1:
        dtype = np.dtype(np.uint16 if dtype.itemsize == 1 else np.uint32)
    windows = _scratch.get(dtype, k)
    return all(
        windows.distinct(flat[at : at + windows.size].astype(dtype, copy=False), k)
        for at in range(0, len(flat), windows.size)
    )
