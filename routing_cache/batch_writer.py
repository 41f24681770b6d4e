"""Packing a batch of sequences into one block of bytes in which a shared row appears once.

Rows are cut into *atoms* wherever any sample's window into a slab begins or ends, so that windows
that overlap only partly still share what they can. With ``layer_blocks`` each atom is stored block
by block, so that a pipeline stage reads its layers and nothing else.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from routing_cache.batch_format import Atom, Reader, Sample, Tables, check_blocks, write_header
from routing_cache.batch_reader import PackedRows
from routing_cache.digest import Digester, total
from routing_cache.errors import LayoutError
from routing_cache.layout import RowLayout, TokenIds
from routing_cache.row_segments import Segment
from routing_cache.sequence_rows import SegmentRows


def pack(
    leases: Sequence[SegmentRows],
    *,
    layer_blocks: Sequence[int] | None = None,
    token_ids: Sequence[TokenIds] | None = None,
) -> PackedRows:
    """Pack sequences; the result refers to the cache's memory until ``tobytes`` copies it.

    Args:
        leases: leases or array rows of one layout.
        layer_blocks: L indices where a new block begins (pipeline stages: ``[0, 12, 24, 36]``);
            None is one block.
        token_ids: of every sequence; needed with several blocks, whose digests are made anew
            after the rows were checked against the recorded ones.

    Raises:
        LayoutError: mixed layouts, impossible blocks, or blocks without ``token_ids``.
        DigestMismatchError: rows and ``token_ids`` do not belong together.
    """
    if not leases:
        raise LayoutError("nothing to pack", got=0, expected="at least one sequence")
    layout = leases[0].layout
    if any(lease.layout != layout for lease in leases):
        raise LayoutError("the sequences belong to different models")
    blocks = check_blocks(layer_blocks, layout.num_moe_layers)
    keys = {lease.digest_key for lease in leases}
    if len(keys) > 1:
        raise LayoutError("the sequences have different digest keys", got=sorted(map(str, keys)))
    key = keys.pop()
    if len(blocks) > 2 and key is not None:
        if token_ids is None or len(token_ids) != len(leases):
            raise LayoutError("layer_blocks need the token_ids of every sequence")
        for lease, ids in zip(leases, token_ids, strict=True):
            lease.verify(ids)
    cuts = _window_edges(leases)
    segments: list[Segment] = []
    numbers: dict[tuple[int, int], int] = {}
    refs: list[list[int]] = []
    for lease in leases:
        own: list[int] = []
        for segment in lease.segments:
            for atom in _atoms_of(segment, cuts[id(segment.slab)]):
                place = (id(atom.slab), atom.offset)
                if place not in numbers:
                    numbers[place] = len(segments)
                    segments.append(atom)
                own.append(numbers[place])
        refs.append(own)
    return _assemble(leases, layout, key, blocks, segments, refs, token_ids)


def _window_edges(leases: Sequence[SegmentRows]) -> dict[int, list[int]]:
    """Return, per slab, the sorted row offsets at which some sample's window begins or ends."""
    edges: dict[int, set[int]] = {}
    for lease in leases:
        for segment in lease.segments:
            known = edges.setdefault(id(segment.slab), set())
            known.add(segment.offset)
            known.add(segment.offset + segment.stop - segment.start)
    return {slab: sorted(known) for slab, known in edges.items()}


def _atoms_of(segment: Segment, edges: list[int]) -> list[Segment]:
    shift = segment.start - segment.offset
    first = bisect_left(edges, segment.offset)
    last = bisect_right(edges, segment.offset + segment.stop - segment.start)
    return [segment.clip(a + shift, b + shift) for a, b in pairwise(edges[first:last])]


def _assemble(
    leases: Sequence[SegmentRows],
    layout: RowLayout,
    digest_key: int | None,
    blocks: tuple[int, ...],
    segments: list[Segment],
    refs: list[list[int]],
    token_ids: Sequence[TokenIds] | None,
) -> PackedRows:
    ids_of: dict[int, TokenIds] = {}
    for own, ids in zip(refs, token_ids or (), strict=bool(token_ids)):
        ids_of.update((n, ids[segments[n].start : segments[n].stop]) for n in own)
    digester = None if digest_key is None else Digester(layout, digest_key)
    atoms: list[Atom] = []
    offset = 0
    for number, segment in enumerate(segments):
        num_rows = segment.stop - segment.start
        digests = _atom_digests(segment, digester, blocks, ids_of.get(number))
        atoms.append(
            Atom(segment.start, num_rows, segment.provenance, segment.has_missing, offset, digests)
        )
        offset += num_rows * layout.row_bytes
    samples = tuple(
        Sample(lease.num_tokens, tuple(own), lease.tail_tokens)
        for lease, own in zip(leases, refs, strict=True)
    )
    tables = Tables(layout, digest_key or 0, digest_key is not None, blocks, tuple(atoms), samples)
    header = write_header(tables)
    return PackedRows(tables, header, _segment_reader(tables, header, segments))


def _atom_digests(
    segment: Segment, digester: Digester | None, blocks: tuple[int, ...], ids: TokenIds | None
) -> tuple[int, ...]:
    if digester is None or segment.digests is None:
        return ()
    if len(blocks) == 2:
        return (total(segment.digests),)
    assert ids is not None
    rows = segment.rows
    return tuple(
        total(
            digester.rows(
                np.ascontiguousarray(rows[:, left:right]),
                ids,
                start=segment.start,
                weight_version=segment.provenance.weight_version,
                first_layer=left,
            )
        )
        for left, right in pairwise(blocks)
    )


def _segment_reader(tables: Tables, header: bytes, segments: list[Segment]) -> Reader:
    """Make a reader of the sender's own memory that looks like the packed block."""
    starts = [atom.offset for atom in tables.atoms]
    layout = tables.layout
    layer_bytes = layout.moe_top_k * layout.dtype.itemsize

    def read(offset: int, num_bytes: int) -> bytes | memoryview:
        if num_bytes == 0:
            return b""
        number = bisect_right(starts, offset - len(header)) - 1
        inside = offset - len(header) - starts[number]
        segment = segments[number]
        rows = segment.rows.astype(layout.dtype.newbyteorder("<"), copy=False)
        num_rows = segment.stop - segment.start
        block = bisect_right(tables.blocks, inside // (num_rows * layer_bytes)) - 1
        left, right = tables.blocks[block], tables.blocks[block + 1]
        inside -= left * num_rows * layer_bytes
        part = np.ascontiguousarray(rows[:, left:right]).reshape(-1).view(np.uint8)
        return part[inside : inside + num_bytes].data

    return read
