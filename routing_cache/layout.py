"""Shape and dtype of routing rows, the experts that a router chose: ``[T, L, K]``.

Axis letters: T tokens, L MoE layers, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from routing_cache.errors import CodecError, LayoutError

Rows = NDArray[np.unsignedinteger]  # [T, L, K] uint8 or uint16
Mask = NDArray[np.bool_]  # [T]
TokenIds = NDArray[np.int32]  # [T]

_INT32 = np.dtype(np.int32)
MAX_LAYERS = 1 << 16
_MAX_ROW_IDS = 1 << 20  # of any model: more would be damage in a file
_MAX_EXPERTS = 65535  # uint16 with one value kept for the missing mark


@dataclass(frozen=True)
class RowLayout:
    """Form of one model's routing rows.

    The dtype follows from the number of experts, never from the ids that happen to occur, and
    keeps one value free as the missing mark.

    Args:
        num_hidden_layers: layers of the model, dense ones included.
        moe_layers: global 0-based numbers of the MoE layers, ascending.
        num_experts: routed experts of a layer (E).
        moe_top_k: experts per token (K).

    Example:
        >>> RowLayout(48, tuple(range(48)), num_experts=128, moe_top_k=8).row_bytes
        384
    """

    num_hidden_layers: int
    moe_layers: tuple[int, ...]
    num_experts: int
    moe_top_k: int

    def __post_init__(self) -> None:
        layers = tuple(int(layer) for layer in self.moe_layers)
        object.__setattr__(self, "moe_layers", layers)
        if not layers or list(layers) != sorted(set(layers)):
            raise LayoutError(
                "moe_layers must be distinct and ascending",
                got=layers,
                expected="at least one global layer number, e.g. (1, 2, 3)",
            )
        if layers[0] < 0 or layers[-1] >= self.num_hidden_layers:
            raise LayoutError(
                "moe_layers names a layer that the model does not have",
                got=layers,
                expected=f"numbers in [0, {self.num_hidden_layers})",
            )
        if not 1 <= self.num_experts <= _MAX_EXPERTS:
            raise LayoutError(
                "num_experts is out of range",
                got=self.num_experts,
                expected=f"1 to {_MAX_EXPERTS}",
            )
        if not 1 <= self.moe_top_k <= self.num_experts:
            raise LayoutError(
                "moe_top_k is out of range",
                got=self.moe_top_k,
                expected=f"1 to num_experts={self.num_experts}",
            )

    @cached_property
    def num_moe_layers(self) -> int:
        """Number of MoE layers, L."""
        return len(self.moe_layers)

    @cached_property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """uint8 up to 255 experts, uint16 above."""
        return np.dtype(np.uint8 if self.num_experts <= 255 else np.uint16)

    @cached_property
    def missing(self) -> int:
        """Mark of an id that is not known: the dtype's largest value, never a valid id."""
        return int(np.iinfo(self.dtype).max)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row in memory, L * K * itemsize."""
        return self.num_moe_layers * self.moe_top_k * self.dtype.itemsize

    @cached_property
    def _moe_index(self) -> NDArray[np.intp]:
        return np.array(self.moe_layers, dtype=np.intp)

    def select(self, rows: NDArray[np.integer]) -> NDArray[np.integer]:
        """Select the MoE layers: ``[T, num_hidden_layers or L, K]`` to ``[T, L, K]``, dtype kept.

        The width decides alone; layers are mapped by their global number, so dense layers in
        front or in between never shift a neighbour's rows. A view where the width is L.

        Raises:
            LayoutError: any other width, another K, another rank, or not an integer dtype.
        """
        if not isinstance(rows, np.ndarray):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise LayoutError(
                "routing rows must be an array", got=type(rows).__name__, expected="[T, L, K]"
            )
        shape = rows.shape
        widths = {self.num_hidden_layers, self.num_moe_layers}
        if len(shape) != 3 or shape[2] != self.moe_top_k or shape[1] not in widths:
            raise LayoutError(
                "routing rows do not fit the model",
                got=shape,
                expected=f"[T, {' or '.join(map(str, sorted(widths)))}, {self.moe_top_k}]",
                fix="check the layer map and moe_top_k against the engine's model",
            )
        if rows.dtype.kind not in "iu":
            raise LayoutError(
                "routing rows must be integers", got=rows.dtype, expected="int or uint"
            )
        if shape[1] == self.num_moe_layers:
            return rows
        return rows[:, self._moe_index]

    def require_room(self, dtype: np.dtype[np.integer]) -> None:
        """Refuse a dtype in which ids must have wrapped.

        Raises:
            LayoutError: it cannot hold the highest id.
        """
        if dtype != self.dtype and np.iinfo(dtype).max < self.num_experts - 1:
            raise LayoutError(
                f"{dtype} cannot hold the ids of {self.num_experts} experts",
                got=dtype,
                expected=f"a dtype that holds {self.num_experts - 1}",
                fix="the ids have wrapped on the way; widen the dtype where they are captured",
            )

    def narrow(self, rows: NDArray[np.integer]) -> Rows:
        """Convert ``rows`` to this layout's dtype, C-contiguous; ids out of range stay so.

        An engine's own mark of an unknown id (-1, or the largest value of an unsigned dtype)
        becomes the missing mark.

        Raises:
            LayoutError: the incoming dtype is too narrow for this many experts, so that ids have
                wrapped already.
        """
        if rows.dtype == self.dtype:
            return np.ascontiguousarray(rows, dtype=self.dtype)
        self.require_room(rows.dtype)
        narrow = rows.astype(self.dtype)
        outside = (rows < 0) | (rows >= self.num_experts)
        if outside.any():
            narrow[outside] = self.missing
            # Only engines' own marks for an unknown id say missing; any other id is damage, and
            # stays out of range where a value is left for that.
            if self.num_experts < self.missing:
                known_marks = (rows == -1) | (rows == np.iinfo(rows.dtype).max)
                known_marks |= (rows == 255) | (rows == 65535)
                narrow[outside & ~known_marks] = self.num_experts
        return np.ascontiguousarray(narrow)

    def canonical(self, rows: NDArray[np.integer]) -> Rows:
        """:meth:`select` then :meth:`narrow`: what the cache stores, ``[T, L, K]``."""
        return self.narrow(self.select(rows))


def check_size(layout: RowLayout) -> None:
    """Refuse a model no one has: its hash keys alone would take gigabytes.

    Raises:
        CodecError: more ids per row than any plausible model.
    """
    num_ids = layout.num_moe_layers * layout.moe_top_k
    if layout.num_hidden_layers > MAX_LAYERS or num_ids > _MAX_ROW_IDS:
        raise CodecError(
            "an implausible model",
            got=f"{layout.num_hidden_layers} layers, {num_ids} ids per row",
            expected=f"at most {MAX_LAYERS} and {_MAX_ROW_IDS}",
        )


def spread_rows(
    num_rows: int, layout: RowLayout, *, first: int = 0, layers: Sequence[int] | None = None
) -> Rows:
    """Make valid rows for padding tokens, ``[num_rows, L, K]``, spread evenly over the experts.

    A token dispatcher needs K distinct ids in range for every token it sees, padding included;
    filling them all alike would send the padding to one expert-parallel rank. ``first`` is the
    number of padding rows made before, so that several calls stay even together. ``layers``
    indexes the L axis; None is all.
    """
    k, experts = layout.moe_top_k, layout.num_experts
    start = np.arange(experts)[:, None, None]
    layer = np.arange(layout.num_moe_layers)[None, :, None]
    # There are as many kinds of row as experts: look them up, wide integers would be 16 times it.
    kinds = ((start + layer + np.arange(k)) % experts).astype(layout.dtype)  # [E, L, K]
    if layers is not None:
        kinds = kinds[:, list(layers)]
    return kinds[(np.arange(first, first + num_rows) * k) % experts]


def missing_rows(rows: Rows, missing: int) -> Mask:
    """Find the missing rows ``[T]`` among stored rows: their first id tells.

    The judge (:func:`~routing_cache.row_check.check_rows`) saw them when they came in, so that a
    stored row holds the mark everywhere or nowhere.
    """
    return np.equal(rows[:, 0, 0], missing)


def expand_mask(part: Mask, where: NDArray[np.intp], length: int) -> Mask:
    """Return the ``[length]`` mask that has ``part`` at ``where`` and is False elsewhere."""
    mask = np.zeros(length, np.bool_)
    mask[where] = part
    return mask


def as_token_ids(token_ids: object) -> TokenIds:
    """Return ``token_ids`` as a contiguous int32 vector; such arrays as they are.

    Raises:
        LayoutError: not one-dimensional, not integers, or out of int32.
    """
    try:
        ids = np.asarray(token_ids)
    except ValueError as error:
        raise LayoutError(
            f"token ids must be a vector of integers: {error}", expected="int32 [T]"
        ) from error
    if ids.dtype == _INT32 and ids.ndim == 1 and ids.flags.c_contiguous:
        return ids
    if ids.size == 0 and ids.ndim == 1:
        return np.empty(0, np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise LayoutError(
            "token ids must be a vector of integers",
            got=f"{ids.dtype} {ids.shape}",
            expected="int32 [T]",
        )
    low, high = int(ids.min()), int(ids.max())
    if low < -(2**31) or high >= 2**31:
        raise LayoutError("token ids do not fit int32", got=(low, high), expected="int32")
    return ids.astype(np.int32)
