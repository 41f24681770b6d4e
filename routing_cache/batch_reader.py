"""A packed batch as its receiver reads it: rows are fetched when they are gathered."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from routing_cache.batch_format import Atom, Reader, Tables, parse_tables, read_header
from routing_cache.digest import Digester, total
from routing_cache.errors import CodecError, DigestMismatchError
from routing_cache.layout import Mask, RowLayout, Rows, TokenIds, as_token_ids, missing_rows
from routing_cache.provenance import Provenance
from routing_cache.sequence_rows import check_range, layer_index


class PackedSample:
    """One sequence of a packed batch; reads rows when asked. Thread-safe if the reader is."""

    def __init__(self, batch: PackedRows, index: int) -> None:
        self._batch = batch
        self.index = index
        self._sample = batch.tables.samples[index]
        self._atoms = [batch.tables.atoms[i] for i in self._sample.atoms]

    @property
    def layout(self) -> RowLayout:
        return self._batch.tables.layout

    @property
    def num_tokens(self) -> int:
        return self._sample.num_tokens

    @property
    def num_rows(self) -> int:
        """Rows from token 0 on that were answered for."""
        return self._atoms[-1].stop if self._atoms else 0

    @property
    def weight_versions(self) -> tuple[int, ...]:
        """Every weight version with rows in here, ascending."""
        return tuple(sorted({a.origin.weight_version for a in self._atoms}))

    @property
    def provenance(self) -> tuple[tuple[int, int, Provenance], ...]:
        """(start, stop, origin) of every run of rows."""
        return tuple((a.start, a.stop, a.origin) for a in self._atoms)

    def gather(
        self, *, layers: Sequence[int] | None = None, start: int = 0, stop: int | None = None
    ) -> tuple[Rows, Mask]:
        """Copy rows as :meth:`SegmentRows.gather` does; reads only the blocks and tokens needed."""
        end = check_range(start, stop, self.num_tokens)
        layout, tables = self.layout, self._batch.tables
        index = layer_index(layers, layout.num_moe_layers)
        columns = np.arange(layout.num_moe_layers)[index]
        out = np.full((end - start, len(columns), layout.moe_top_k), layout.missing, layout.dtype)
        present = np.zeros(end - start, np.bool_)
        first = bisect_right(self._atoms, start, key=lambda a: a.stop)
        for atom in self._atoms[first:]:
            if atom.start >= end:
                break
            low, high = max(start, atom.start), min(end, atom.stop)
            target = slice(low - start, high - start)
            for block, (left, right) in enumerate(pairwise(tables.blocks)):
                inside = np.flatnonzero((columns >= left) & (columns < right))
                # Without any layer asked for, one block still tells which rows are missing.
                asks_presence = atom.has_missing and len(columns) == 0 and block == 0
                if len(inside) == 0 and not asks_presence:
                    continue
                rows = self._batch.read(atom, block, low - atom.start, high - atom.start)
                if isinstance(index, slice) and len(inside) == rows.shape[1] == len(columns):
                    out[target] = rows
                else:
                    out[target, inside] = rows[:, columns[inside] - left]
                if atom.has_missing:
                    present[target] = ~missing_rows(rows, layout.missing)
            if not atom.has_missing:
                present[target] = True
        return out, present

    def verify(self, token_ids: TokenIds, *, layers: Sequence[int] | None = None) -> None:
        """Check that rows, ``token_ids`` and weight versions belong together.

        ``layers`` limits the check (and what is read) to the layer blocks they touch.

        Raises:
            DigestMismatchError: they do not; the message names sample, tokens and layers.
        """
        ids = as_token_ids(token_ids)
        if len(ids) != self.num_tokens:
            raise DigestMismatchError(
                f"sample {self.index} has another length", got=len(ids), expected=self.num_tokens
            )
        if ids[self.num_rows :].tobytes() != self._sample.tail_tokens:
            raise DigestMismatchError(f"sample {self.index}: the tokens behind its last row differ")
        wanted = range(self.layout.num_moe_layers) if layers is None else layers
        for number, atom in zip(self._sample.atoms, self._atoms, strict=True):
            for block, (left, right) in enumerate(pairwise(self._batch.tables.blocks)):
                if any(left <= layer < right for layer in wanted):
                    part = ids[atom.start : atom.stop]
                    if not self._batch.check(number, block, part):
                        raise DigestMismatchError(
                            f"sample {self.index}: tokens [{atom.start}, {atom.stop}), their rows "
                            f"in MoE layers [{left}, {right}) and weight version "
                            f"{atom.origin.weight_version} do not belong together",
                            fix="tokens or rows were changed or mixed up after the rollout",
                        )

    def release(self) -> None:
        """Do nothing: the batch owns its bytes. Here so that a sample reads like a lease."""


class PackedRows:
    """A packed batch: index it for samples, ``tobytes`` or ``parts`` to send it."""

    def __init__(self, tables: Tables, header: bytes, reader: Reader) -> None:
        self.tables = tables
        self.header = header
        self._reader = reader
        self._digester = Digester(tables.layout, tables.digest_key)
        self._verified: dict[tuple[int, int], bytes] = {}
        self.bytes_read = 0  # payload bytes fetched so far

    def __len__(self) -> int:
        return len(self.tables.samples)

    def __getitem__(self, index: int) -> PackedSample:
        return PackedSample(self, range(len(self))[index])

    def __iter__(self) -> Iterator[PackedSample]:
        return (self[index] for index in range(len(self)))

    @property
    def nbytes(self) -> int:
        """Size of the whole block, header included."""
        return len(self.header) + self.tables.payload_bytes

    @property
    def num_unique_rows(self) -> int:
        return sum(atom.num_rows for atom in self.tables.atoms)

    def tobytes(self) -> bytes:
        """Return the block to send or store, with one copy of every row."""
        return b"".join([self.header, *self.parts()])

    def parts(self) -> list[bytes | memoryview]:
        """Return the payload in order; rows that lie in memory as they are sent are not copied."""
        return [
            self._reader(
                len(self.header) + atom.offset + left * atom.num_rows * self._layer_bytes,
                (right - left) * atom.num_rows * self._layer_bytes,
            )
            for atom in self.tables.atoms
            for left, right in pairwise(self.tables.blocks)
        ]

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> PackedRows:
        """Read a received buffer (also a memory map); rows are views into it until gathered.

        Raises:
            CodecError: foreign, truncated or damaged.
        """
        view = memoryview(data).cast("B")

        def read(offset: int, num_bytes: int) -> memoryview:
            return view[offset : offset + num_bytes]

        return cls.from_reader(read, len(view))

    @classmethod
    def from_reader(cls, read: Reader, num_bytes: int) -> PackedRows:
        """Read through anything that can read a byte range, such as an object store. Lazy.

        Args:
            num_bytes: size of the whole block.
        """
        header, payload_bytes = read_header(read, num_bytes)
        tables = parse_tables(header)
        if not payload_bytes == tables.payload_bytes == num_bytes - len(header):
            raise CodecError(
                "the packed batch is cut short or too long",
                got=num_bytes,
                expected=len(header) + tables.payload_bytes,
            )
        return cls(tables, header, read)

    @property
    def _layer_bytes(self) -> int:
        return self.tables.layout.moe_top_k * self.tables.layout.dtype.itemsize

    def read(self, atom: Atom, block: int, start: int, stop: int) -> Rows:
        """Read rows ``[stop-start, layers of block, K]`` of an atom."""
        layout, blocks = self.tables.layout, self.tables.blocks
        left, right = blocks[block], blocks[block + 1]
        row_bytes = (right - left) * self._layer_bytes
        offset = len(self.header) + atom.offset + left * atom.num_rows * self._layer_bytes
        data = self._reader(offset + start * row_bytes, (stop - start) * row_bytes)
        if len(data) != (stop - start) * row_bytes:
            raise CodecError(
                "the reader returned too little", got=len(data), expected=(stop - start) * row_bytes
            )
        self.bytes_read += len(data)
        rows = np.frombuffer(data, layout.dtype.newbyteorder("<")).astype(layout.dtype, copy=False)
        return rows.reshape(stop - start, right - left, layout.moe_top_k)

    def check(self, number: int, block: int, token_ids: TokenIds) -> bool:
        """Tell whether an atom's rows fit ``token_ids``; shared rows are hashed once."""
        atom = self.tables.atoms[number]
        if not atom.digests:
            raise DigestMismatchError("this batch carries no digests")
        ids = token_ids.tobytes()
        if self._verified.get((number, block)) == ids:
            return True
        digests = self._digester.rows(
            self.read(atom, block, 0, atom.num_rows),
            token_ids,
            start=atom.start,
            weight_version=atom.origin.weight_version,
            first_layer=self.tables.blocks[block],
        )
        if total(digests) != atom.digests[block]:
            return False
        self._verified[number, block] = ids
        return True
