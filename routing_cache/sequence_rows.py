"""Rows of one sequence by reference, which a lease and a foreign array share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from routing_cache.digest import Digester, Digests, join, tail_digest, total
from routing_cache.errors import DigestMismatchError, LayoutError, RowCountError
from routing_cache.layout import Mask, RowLayout, Rows, TokenIds, as_token_ids, missing_rows
from routing_cache.provenance import Provenance
from routing_cache.row_check import expected_rows, take_rows
from routing_cache.row_segments import Segment, Slab, clip_all, join_neighbours


def layer_index(layers: Sequence[int] | None, num_layers: int) -> slice | list[int]:
    """Return the index of the L axis for ``layers``; a slice, which copies faster, if possible."""
    if layers is None:
        return slice(0, num_layers)
    wanted = [int(layer) for layer in layers]
    if any(not 0 <= layer < num_layers for layer in wanted):
        raise LayoutError(
            "layers index the MoE axis, not the model's layers",
            got=wanted,
            expected=f"numbers in [0, {num_layers})",
        )
    if wanted and all(b == a + 1 for a, b in pairwise(wanted)):
        return slice(wanted[0], wanted[-1] + 1)
    return wanted


def check_range(start: int, stop: int | None, num_tokens: int) -> int:
    """Return ``stop`` or its default; refuses a range outside the sequence."""
    end = num_tokens if stop is None else stop
    if not 0 <= start <= end <= num_tokens:
        raise RowCountError(
            "the token range lies outside the sequence",
            got=(start, stop),
            expected=f"0 <= start <= stop <= {num_tokens}",
        )
    return end


def copy_layers(source: Rows, target: Rows, index: slice | list[int]) -> None:
    """Copy ``source[:, index]`` to ``target``, contiguous ``[T, L, K]`` arrays."""
    if not isinstance(index, slice):
        np.take(source, index, axis=1, out=target, mode="clip")
    elif target.shape == source.shape:
        np.copyto(target, source)
    elif target.size:
        # As one opaque element a row's run of layers is copied three times as fast.
        k = source.shape[2]
        element = f"V{target.shape[1] * k * source.itemsize}"
        part = source.reshape(len(source), -1)[:, index.start * k : index.stop * k]
        np.copyto(target.reshape(len(target), -1).view(element), part.view(element))


class SegmentRows:
    """Rows of a sequence of ``num_tokens`` tokens, held as segments. Immutable.

    Reading is safe from any thread.
    """

    def __init__(
        self,
        layout: RowLayout,
        segments: tuple[Segment, ...],
        tail_tokens: bytes,
        num_tokens: int,
        digester: Digester,
    ) -> None:
        self.layout = layout
        self._segments = segments
        self._tail_tokens = tail_tokens  # int32 bytes of the tokens behind the last row
        self._num_tokens = num_tokens
        self._digester = digester
        self._joined: list[Segment] | None = None  # made on first use

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def num_rows(self) -> int:
        """Rows from token 0 on that were answered for, missing ones included."""
        return self._segments[-1].stop if self._segments else 0

    @property
    def weight_versions(self) -> tuple[int, ...]:
        """Every weight version with rows in here, ascending."""
        return tuple(sorted({s.provenance.weight_version for s in self._segments}))

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The references themselves, in token order: zero-copy views and provenance."""
        return self._segments

    @property
    def digest(self) -> int:
        """64-bit digest over weight versions, token ids and rows of the whole sequence.

        Raises:
            DigestMismatchError: the cache was built without digests.
        """
        parts = [total(self._digests(s)) for s in self._segments]
        return join(*parts, tail_digest(self._tail_tokens, self.num_rows, self._digester.key))

    @property
    def tail_tokens(self) -> bytes:
        """int32 bytes of the tokens behind the last row, normally one."""
        return self._tail_tokens

    @property
    def digest_key(self) -> int | None:
        """Key of the rows' digests; None when they have none."""
        if any(s.slab.digests is None for s in self._segments):
            return None
        return self._digester.key

    def gather(
        self, *, layers: Sequence[int] | None = None, start: int = 0, stop: int | None = None
    ) -> tuple[Rows, Mask]:
        """Copy rows ``[stop-start, len(layers), K]`` and which are present ``[stop-start]``.

        ``layers`` index the L axis (MoE layers in ascending global order); None is all. A sequence
        of T tokens has T-1 rows at most: row T-1 is never present. Rows that are not present hold
        the missing mark.

        Raises:
            RowCountError: the range lies outside the sequence.
            LayoutError: a layer index outside [0, L).
        """
        self._check_usable()
        end = check_range(start, stop, self._num_tokens)
        index = layer_index(layers, self.layout.num_moe_layers)
        width = index.stop - index.start if isinstance(index, slice) else len(index)
        out = np.empty((end - start, width, self.layout.moe_top_k), self.layout.dtype)
        present = np.zeros(end - start, np.bool_)
        known = start
        runs = self._runs(start, end)
        self._check_usable()  # again: another thread may have released it meanwhile
        for run in runs:
            source, place = run.rows, slice(run.start - start, run.stop - start)
            copy_layers(source, out[place], index)
            known_rows = present[place]
            if run.has_missing:
                np.logical_not(missing_rows(source, self.layout.missing), out=known_rows)
            else:
                known_rows[:] = True
            known = run.stop
        out[known - start :] = self.layout.missing
        return out, present

    def verify(self, token_ids: TokenIds) -> None:
        """Check that rows, ``token_ids`` and weight versions belong together.

        Raises:
            DigestMismatchError: they do not; the message names the first row that is wrong.
        """
        self._check_usable()
        ids = as_token_ids(token_ids)
        if len(ids) != self._num_tokens:
            raise DigestMismatchError(
                "these rows belong to a sequence of another length",
                got=f"{len(ids)} tokens",
                expected=f"{self._num_tokens}",
            )
        for segment in self._segments:
            found = self._digester.rows(
                segment.rows,
                ids[segment.start : segment.stop],
                start=segment.start,
                weight_version=segment.provenance.weight_version,
            )
            expected = self._digests(segment)
            if not np.array_equal(found, expected):
                row = segment.start + int(np.argmax(found != expected))
                raise DigestMismatchError(
                    f"row {row}, token id {ids[row]} and weight version "
                    f"{segment.provenance.weight_version} do not belong together",
                    got=f"{int(found[row - segment.start]):#x}",
                    expected=f"{int(expected[row - segment.start]):#x}",
                    fix="tokens or rows were changed, reordered or mixed up after the rollout",
                )
        if ids[self.num_rows :].tobytes() != self._tail_tokens:
            raise DigestMismatchError(
                "the tokens behind the last row differ from the recorded ones",
                got=ids[self.num_rows :].tolist()[:8],
                expected=np.frombuffer(self._tail_tokens, np.int32).tolist()[:8],
                fix="tokens were changed, reordered or mixed up after the rollout",
            )

    def _digests(self, segment: Segment) -> Digests:
        digests = segment.digests
        if digests is None:
            raise DigestMismatchError(
                "these rows carry no digest",
                got="digest=False",
                expected="a RoutingCache built with digest=True",
            )
        return digests

    def _check_usable(self) -> None:
        """Refuse rows that were given back; the base class has nothing to refuse."""

    def _runs(self, start: int, stop: int) -> list[Segment]:
        """Return the segments inside ``[start, stop)``, neighbours in memory joined."""
        if self._joined is None:
            self._joined = join_neighbours(self._segments)
        return clip_all(self._joined, start, stop)


class ArrayRows(SegmentRows):
    """Routing rows of one sequence over a plain array: for tests and foreign rollouts.

    Args:
        rows: ``[T-1 or T, L or num_hidden_layers, K]`` for T tokens. A T-th row is dropped: the
            last token was not fed forward, so whatever stands there is padding.
        present: ``[len(rows)]``; rows that are not present count as missing. None is all.

    Bad rows are marked missing and counted in ``num_bad``.
    """

    def __init__(
        self,
        layout: RowLayout,
        token_ids: TokenIds,
        rows: Rows,
        present: Mask | None = None,
        weight_version: int = 0,
    ) -> None:
        ids = as_token_ids(token_ids)
        num_rows = expected_rows(len(ids))
        if num_rows < 0 or len(rows) not in (num_rows, num_rows + 1):
            raise RowCountError(
                "rows do not cover the tokens",
                got=f"{len(rows)} rows for {len(ids)} tokens",
                expected=f"{max(num_rows, 0)}",
            )
        block = layout.canonical(rows)[:num_rows].copy()
        if present is not None:
            if len(present) != len(rows):
                raise RowCountError(
                    "present does not fit the rows", got=len(present), expected=len(rows)
                )
            block[~present[:num_rows]] = layout.missing
        block, check = take_rows(block, layout)
        self.num_bad = check.num_bad
        digester = Digester(layout)
        digests = digester.rows(block, ids[:num_rows], start=0, weight_version=weight_version)
        slab = Slab(block, digests)
        slab.used, slab.open = num_rows, False
        origin = Provenance("array", weight_version, "decode")
        has_missing = not check.all_good
        segments = (Segment(0, num_rows, slab, 0, origin, has_missing),) if num_rows else ()
        super().__init__(layout, segments, ids[num_rows:].tobytes(), len(ids), digester)
        self._weight_version = weight_version

    @property
    def weight_versions(self) -> tuple[int, ...]:
        return (self._weight_version,)

    def release(self) -> None:
        """Do nothing; here so that it reads like a lease."""
