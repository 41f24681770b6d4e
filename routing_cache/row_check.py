"""The one judge of routing rows: how many a reply must have, and which of them can be trusted.

A row is good when every MoE layer has K distinct ids in range. Nearly every block is clean, so
the question asked first is whether all of it is. A compiled kernel answers it in one pass over the
bytes; where it was not built, or does not know the model's K, numpy does in K passes. Only parts
that are not clean are judged row by row, by one definition.
"""

from __future__ import annotations

import threading
from importlib import import_module
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from routing_cache.errors import LayoutError, RowCountError
from routing_cache.layout import Mask, RowLayout, Rows, expand_mask

try:
    all_rows_good = import_module("routing_cache._kernel").all_rows_good
except ImportError:  # no compiler where the package was installed
    all_rows_good = None

_KERNEL_TOP_K = (2, 4, 8)
_UINT16_MAX = 65535
_PART_IDS = 1 << 17  # ids judged at one time: copies of them stay in the second-level cache


class RowCheck(NamedTuple):
    """Outcome of :func:`check_rows`; a mask is None when no row has it."""

    bad: Mask | None  # [T] out-of-range or repeated ids
    missing: Mask | None  # [T] every id is the missing mark
    first_bad: tuple[int, int] | None = None  # (index of the row, of its layer in the block)

    @property
    def num_bad(self) -> int:
        return 0 if self.bad is None else int(np.count_nonzero(self.bad))

    @property
    def num_missing(self) -> int:
        return 0 if self.missing is None else int(np.count_nonzero(self.missing))

    @property
    def all_good(self) -> bool:
        """True when no row is bad or missing."""
        return self.bad is None and self.missing is None


_CLEAN = RowCheck(None, None)


def expected_rows(num_tokens: int, start: int = 0) -> int:
    """Count the rows from ``start`` on that a sequence of ``num_tokens`` tokens must have.

    One fewer than tokens, because the last sampled token was not fed forward. A prompt that was
    fed without sampling anything has the rows of a sequence one token longer.
    """
    return num_tokens - 1 - start


def check_rows(
    rows: NDArray[np.integer], layout: RowLayout, present: Mask | None = None
) -> RowCheck:
    """Find the rows of a ``[T, L', K]`` block that cannot be trusted.

    A row is *missing* when all of its ids are the missing mark, *bad* when an id is out of range
    or the K ids of a layer are not distinct.

    Args:
        rows: rows of all MoE layers or of any subset, such as a pipeline stage's; any integer
            dtype that holds the ids, contiguous or not. Nothing is written and nothing larger
            than 256 KiB is copied. Other dtypes than the layout's are judged as
            :meth:`RowLayout.narrow` reads them: -1 and the largest unsigned value mark a missing
            id.
        present: ``[T]``; rows that are not present are not judged (those that are get copied
            once). None judges all.

    Raises:
        LayoutError: another rank or K, no integers, or a dtype too narrow for the experts.
        RowCountError: ``present`` of another length.
    """
    if rows.ndim != 3 or rows.shape[2] != layout.moe_top_k or rows.dtype.kind not in "iu":
        raise LayoutError(
            "routing rows do not fit the model",
            got=f"{rows.dtype} {rows.shape}",
            expected=f"integers [T, layers, {layout.moe_top_k}]",
        )
    layout.require_room(rows.dtype)
    if present is not None:
        if len(present) != len(rows):
            raise RowCountError(
                "present does not fit the rows", got=len(present), expected=len(rows)
            )
        if not present.all():
            return _check_present(rows, layout, np.flatnonzero(present))
    ids = _unsigned(rows)
    # Sets in another order are as clean, so a block that lies layer by layer is not copied.
    as_it_lies = ids if _is_plain(ids) else ids.swapaxes(0, 1)
    if rows.size == 0 or (_is_plain(as_it_lies) and _surely_clean(as_it_lies, layout)):
        return _CLEAN
    bad, missing = np.zeros((2, len(rows)), np.bool_)
    first_bad = None
    step = max(1, _PART_IDS // max(1, rows.shape[1] * rows.shape[2]))
    for at in range(0, len(rows), step):
        here = slice(at, at + step)
        if _surely_clean(_plain(ids[here], layout), layout):
            continue
        missing[here], bad_sets = _judge(layout.narrow(rows[here]), layout)
        if bad_sets is not None:
            bad[here] = bad_sets.any(axis=1)
            if first_bad is None:
                row, layer = divmod(int(bad_sets.argmax()), rows.shape[1])
                first_bad = (at + row, layer)
    return RowCheck(
        None if first_bad is None else bad, missing if missing.any() else None, first_bad
    )


def take_rows(rows: Rows, layout: RowLayout) -> tuple[Rows, RowCheck]:
    """Judge canonical rows that come in; bad ones are missing in the rows returned.

    Those are a copy where some are bad, else ``rows``.
    """
    check = check_rows(rows, layout)
    if check.bad is not None:
        rows = rows.copy()
        rows[check.bad] = layout.missing
    return rows, check


def _check_present(
    rows: NDArray[np.integer], layout: RowLayout, kept: NDArray[np.intp]
) -> RowCheck:
    bad, missing, first = check_rows(rows[kept], layout)
    return RowCheck(
        None if bad is None else expand_mask(bad, kept, len(rows)),
        None if missing is None else expand_mask(missing, kept, len(rows)),
        None if first is None else (int(kept[first[0]]), first[1]),
    )


def _unsigned(rows: NDArray[np.integer]) -> NDArray[np.unsignedinteger]:
    """View ``rows`` as unsigned: a negative id becomes one that is out of range."""
    return rows.view(np.dtype(rows.dtype.str.replace("i", "u")))


def _is_plain(ids: NDArray[np.unsignedinteger]) -> bool:
    return ids.itemsize <= 2 and ids.dtype.isnative and ids.flags.c_contiguous


def _plain(ids: NDArray[np.unsignedinteger], layout: RowLayout) -> Rows:
    """Make ``ids`` contiguous uint8 or uint16; ids out of range stay so."""
    if _is_plain(ids):
        return ids
    if ids.itemsize > 2 or not ids.dtype.isnative:
        narrow = ids.astype(np.uint16)
        if int(ids.max()) > _UINT16_MAX:
            narrow[ids > _UINT16_MAX] = layout.num_experts
        return narrow
    if ids.strides[2] != ids.itemsize:
        return np.ascontiguousarray(ids)
    # As one opaque element a set, or a row's run of layers, is copied several times as fast.
    sets = ids.view(f"V{ids.shape[2] * ids.itemsize}")[:, :, 0]
    if sets.strides[1] == sets.itemsize:
        sets = sets.view(f"V{ids.shape[1] * sets.itemsize}")
    return np.ascontiguousarray(sets).view(ids.dtype).reshape(ids.shape)


def _judge(block: Rows, layout: RowLayout) -> tuple[Mask, NDArray[np.bool_] | None]:
    """Find the missing rows ``[T]`` and the bad sets ``[T, L']`` of a canonical block.

    The second is None when all rows are good or missing.
    """
    missing: Mask = np.equal(block[:, 0, 0], layout.missing)
    missing[missing] = (block[missing].reshape(-1, block[0].size) == layout.missing).all(axis=1)
    if missing.all() or (missing.any() and _surely_clean(block[~missing], layout)):
        return missing, None
    planes = np.ascontiguousarray(np.moveaxis(block, 2, 0))  # [K, T, L']
    bad: NDArray[np.bool_] = np.any(planes >= layout.num_experts, axis=0)
    for first in range(1, len(planes)):
        for second in range(first):
            bad |= planes[first] == planes[second]
    bad[missing] = False
    return missing, bad if bad.any() else None


def _surely_clean(rows: Rows, layout: RowLayout) -> bool:
    """Tell that every row is good. False asks for the slow check."""
    if kernel_knows(rows, layout):
        return clean_by_kernel(rows, layout)
    return clean_by_numpy(rows, layout)


def kernel_knows(rows: Rows, layout: RowLayout) -> bool:
    """Tell whether the compiled kernel was built and judges such rows."""
    if all_rows_good is None or layout.moe_top_k not in _KERNEL_TOP_K:
        return False
    return rows.itemsize <= 2 and rows.flags.c_contiguous


def clean_by_kernel(rows: Rows, layout: RowLayout) -> bool:
    """Tell, in one pass over the bytes, that all ids are in range and distinct in every set."""
    assert all_rows_good is not None
    return all_rows_good(rows, rows.itemsize, layout.moe_top_k, layout.num_experts)


def clean_by_numpy(rows: Rows, layout: RowLayout) -> bool:
    """Tell the same without a compiler, for any K and dtype."""
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
        """Tell whether the ids of each set of at most ``size`` elements differ."""
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


# Buffers that stay allocated, per thread: fresh ones cost more in page faults than the check.
_scratch = threading.local()
_WINDOW_BYTES = 7 << 16  # 64 KiB of rows at K=8: fits the second-level cache


def _surely_distinct(rows: Rows, layout: RowLayout) -> bool:
    """Tell that all ids of every set differ; all are in range. False asks for the slow check.

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
    key = f"{dtype.str} {k}"
    windows: _Windows | None = getattr(_scratch, key, None)
    if windows is None:
        windows = _Windows(dtype, k)
        setattr(_scratch, key, windows)
    return all(
        windows.distinct(flat[at : at + windows.size].astype(dtype, copy=False), k)
        for at in range(0, len(flat), windows.size)
    )
