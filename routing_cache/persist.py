"""Saving and loading what the trees know: one file, checked by a cryptographic hash.

The file is written aside, synced and renamed, so that a killed process leaves the old one. Row
digests go with the rows, so the binding to tokens and weight version survives.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from routing_cache.core import CacheCore
from routing_cache.errors import BudgetError, CodecError, LayoutError
from routing_cache.layout import RowLayout, check_size
from routing_cache.provenance import ConflictPolicy, Provenance, read_origins
from routing_cache.radix_tree import TOKEN_BYTES, Node, RadixTree
from routing_cache.row_index import RowIndex
from routing_cache.row_segments import Segment, Slab

_MAGIC = b"RRCACHE1"
_PREFIX = struct.Struct("<8sQ")  # magic, bytes of the JSON index
_HASH_BYTES = 32
_CHUNK_BYTES = 1 << 20
_MAX_INDEX_BYTES = 1 << 30


@dataclass(frozen=True)
class _SavedSegment:
    start: int
    num_rows: int
    origin: int
    has_missing: bool


@dataclass(frozen=True)
class _SavedNode:
    parent: int  # position in the version's list, -1 for the root
    num_tokens: int
    age: int  # orders nodes by their last use
    segments: tuple[_SavedSegment, ...]


@dataclass(frozen=True)
class SavedIndex:
    layout: RowLayout
    conflict_policy: ConflictPolicy
    digest_key: int
    with_digests: bool
    origins: tuple[Provenance, ...]
    versions: tuple[tuple[int, tuple[_SavedNode, ...]], ...]


def write_saved(core: CacheCore, path: Path) -> int:
    """Write all trees of ``core`` to ``path``; returns the file's size in bytes.

    Open sessions and leases are not saved; what they recorded is.
    """
    with core.guard:
        versions = [(version, list(tree.nodes())) for version, tree in sorted(core.trees.items())]
        segments = [s for _, nodes in versions for node in nodes for s in node.payload.segments]
        origins = list(dict.fromkeys(s.provenance for s in segments))
        index = json.dumps(
            {
                "layout": astuple(core.layout),
                "conflict_policy": core.conflict_policy,
                "digest_key": core.digester.key,
                "with_digests": core.store.with_digests,
                "origins": origins,
                "versions": [[v, _describe(nodes, origins)] for v, nodes in versions],
            }
        ).encode()
        with _replacing(path) as file:
            writer = _HashingWriter(file)
            writer.write(_PREFIX.pack(_MAGIC, len(index)))
            writer.write(index)
            for _, nodes in versions:
                for node in nodes:
                    writer.write(node.edge)
            for segment in segments:
                rows = segment.rows
                writer.write(
                    rows.astype(rows.dtype.newbyteorder("<"), copy=False).reshape(-1).data.cast("B")
                )
                if segment.digests is not None:
                    writer.write(segment.digests.astype("<u8", copy=False).data.cast("B"))
            file.write(writer.digest())
            return writer.num_bytes + _HASH_BYTES


@contextmanager
def open_saved(path: Path, layout: RowLayout | None) -> Generator[tuple[SavedIndex, BinaryIO]]:
    """Yield the index of a saved cache, and the file behind it for :func:`restore`.

    Raises:
        CodecError: foreign, truncated or damaged.
        LayoutError: rows of another model than ``layout``; None takes the file's word.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        _check_hash(file, size, path)
        index = _read_index(file, size)
        if layout is not None and layout != index.layout:
            raise LayoutError(
                "the file holds rows of another model", got=index.layout, expected=layout
            )
        yield index, file


def restore(core: CacheCore, index: SavedIndex, file: BinaryIO) -> None:
    """Fill an empty cache of the index's settings with what :func:`write_saved` wrote. Mutates.

    Raises:
        CodecError: the file contradicts itself.
        BudgetError: it does not fit the budget.
    """
    with core.guard:
        nodes = [
            (node, saved)
            for version, saved_nodes in index.versions
            for node, saved in _restore_tree(core, version, saved_nodes, file)
        ]
        _check_budget(core, nodes)
        for node, saved in nodes:
            node.payload.segments = [_read_segment(core, s, index, file) for s in saved.segments]
        for node, _ in sorted(nodes, key=lambda pair: pair[1].age):
            core.lru.touch(node)


def _describe(nodes: list[Node[RowIndex]], origins: list[Provenance]) -> list[object]:
    numbers = {id(node): number for number, node in enumerate(nodes)}
    origin_numbers = {origin: number for number, origin in enumerate(origins)}
    return [
        [
            numbers.get(id(node.parent), -1),
            len(node.edge) // TOKEN_BYTES,
            node.last_used,
            [
                [s.start, s.stop - s.start, origin_numbers[s.provenance], int(s.has_missing)]
                for s in node.payload.segments
            ],
        ]
        for node in nodes
    ]


class _HashingWriter:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.blake2b(digest_size=_HASH_BYTES)
        self.num_bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.num_bytes += len(data)

    def digest(self) -> bytes:
        return self._hash.digest()


@contextmanager
def _replacing(path: Path) -> Generator[BinaryIO]:
    """Yield a file that takes ``path``'s place when the block ends well, else vanishes."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with aside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _check_hash(file: BinaryIO, size: int, path: Path) -> None:
    """Read the whole file once in small pieces before anything in it is believed."""
    if size < _PREFIX.size + _HASH_BYTES or file.read(len(_MAGIC)) != _MAGIC:
        raise CodecError(f"{path} is no saved routing cache", got=f"{size} bytes")
    digest = hashlib.blake2b(_MAGIC, digest_size=_HASH_BYTES)
    left = size - _HASH_BYTES - len(_MAGIC)
    while left > 0:
        piece = file.read(min(left, _CHUNK_BYTES))
        digest.update(piece)
        left -= len(piece)
    if file.read(_HASH_BYTES) != digest.digest():
        raise CodecError(f"{path} is truncated or damaged", fix="use the save before it")
    file.seek(0)


def _read_index(file: BinaryIO, size: int) -> SavedIndex:
    _, index_bytes = _PREFIX.unpack(file.read(_PREFIX.size))
    if index_bytes > min(size, _MAX_INDEX_BYTES):
        raise CodecError("the index is larger than the file", got=index_bytes, expected=size)
    try:
        return _parse_index(file.read(index_bytes))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, LayoutError) as error:
        raise CodecError(f"the index is no index of a routing cache: {error!r}") from error


def _parse_index(text: bytes) -> SavedIndex:
    data = cast("dict[str, object]", json.loads(text))
    hidden, layers, experts, top_k = cast("tuple[int, list[int], int, int]", data["layout"])
    origins = tuple(read_origins(data["origins"]))
    layout = RowLayout(int(hidden), tuple(layers), int(experts), int(top_k))
    check_size(layout)
    policy = str(data["conflict_policy"])
    if policy not in ("first", "latest"):
        raise ValueError(f"conflict_policy {policy}")
    versions = tuple(
        (int(version), tuple(_parse_node(item, len(origins)) for item in nodes))
        for version, nodes in cast("list[tuple[int, list[list[object]]]]", data["versions"])
    )
    return SavedIndex(
        layout,
        policy,
        int(cast("int", data["digest_key"])),
        bool(data["with_digests"]),
        origins,
        versions,
    )


def _parse_node(item: list[object], num_origins: int) -> _SavedNode:
    parent, num_tokens, age, segments = cast("tuple[int, int, int, list[list[int]]]", tuple(item))
    parsed = tuple(
        _SavedSegment(int(start), int(num_rows), int(origin), bool(missing))
        for start, num_rows, origin, missing in segments
    )
    if any(not 0 <= s.origin < num_origins or s.num_rows <= 0 for s in parsed):
        raise ValueError("a segment names no origin or no rows")
    return _SavedNode(int(parent), int(num_tokens), int(age), parsed)


def _restore_tree(
    core: CacheCore, version: int, saved_nodes: tuple[_SavedNode, ...], file: BinaryIO
) -> list[tuple[Node[RowIndex], _SavedNode]]:
    tree: RadixTree[RowIndex] = core.tree(version)
    nodes: list[Node[RowIndex]] = []
    for saved in saved_nodes:
        if not -1 <= saved.parent < len(nodes):
            raise CodecError("a node comes before its parent", got=saved.parent)
        parent = tree.root if saved.parent < 0 else nodes[saved.parent]
        edge = _read_exactly(file, saved.num_tokens * TOKEN_BYTES)
        nodes.append(tree.graft(parent, edge))
        end = parent.end
        for segment in saved.segments:
            if segment.start < end:
                raise CodecError("segments overlap or leave their node", got=segment.start)
            end = segment.start + segment.num_rows
        if end > nodes[-1].end:
            raise CodecError("segments leave their node", got=end, expected=nodes[-1].end)
    return list(zip(nodes, saved_nodes, strict=True))


def _check_budget(core: CacheCore, nodes: list[tuple[Node[RowIndex], _SavedNode]]) -> None:
    """Refuse before reading: evicting what was just loaded would give half a cache."""
    num_rows = sum(segment.num_rows for _, saved in nodes for segment in saved.segments)
    needed = num_rows * core.store.slab_row_bytes + core.lru.num_bytes
    budget = core.store.budget_bytes
    if budget is not None and needed > budget:
        raise BudgetError(
            "the saved cache does not fit the budget",
            got=f"{needed} bytes",
            expected=f"budget_bytes={budget}",
            fix="raise budget_bytes",
        )


def _read_segment(
    core: CacheCore, saved: _SavedSegment, index: SavedIndex, file: BinaryIO
) -> Segment:
    layout = core.layout
    data = _read_exactly(file, saved.num_rows * layout.row_bytes)
    rows = np.frombuffer(data, layout.dtype.newbyteorder("<")).astype(layout.dtype)
    digests = None
    if index.with_digests:
        digests = np.frombuffer(_read_exactly(file, 8 * saved.num_rows), "<u8").astype(np.uint64)
    shape = (saved.num_rows, layout.num_moe_layers, layout.moe_top_k)
    slab: Slab = core.store.adopt_array(rows, digests, shape)
    return Segment(
        saved.start,
        saved.start + saved.num_rows,
        slab,
        0,
        index.origins[saved.origin],
        saved.has_missing,
    )


def _read_exactly(file: BinaryIO, num_bytes: int) -> bytes:
    # Looked at first: read() allocates what it is asked for, whatever the file holds.
    left = os.fstat(file.fileno()).st_size - file.tell()
    if not 0 <= num_bytes <= left:
        raise CodecError("the file is cut short", got=left, expected=num_bytes)
    return file.read(num_bytes)
