"""A batch of train samples as one block of bytes, and back: every shared routing row once.

::

    prefix    magic, bytes of the index, bytes of the token arrays
    index     JSON: id, number of tokens, weight versions, whether it has rows, of every sample
    tokens    loss_mask as bits, token_ids int32; rollout_logprobs and advantages float32, each as
              bits that say where it is not zero (mostly: on sampled tokens) and those values
    rows      routing_cache's packed batch, read lazily: a rank touches what it gathers
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import orjson
from numpy.typing import DTypeLike

from agent_rl.errors import ReplayError, TrainerError
from agent_rl.trainer.workers.world import chunk_blocks
from agent_rl.types import TrainSample
from routing_cache import PackedRows, PackedSample, RoutingCacheError, pack
from routing_cache.sequence_rows import SegmentRows

_MAGIC = b"RLBATCH1"
_PREFIX = struct.Struct("<8sQQ")
_ALIGNMENT = 8
_SPARSE = ("rollout_logprobs", "advantages")
_TOKEN_ARRAYS = ("loss_mask", "token_ids", *_SPARSE)


@dataclass(frozen=True)
class SampleBlock:
    """An encoded batch. ``parts`` in order are the block; the rows still lie in the cache."""

    parts: list[bytes | memoryview]
    nbytes: int  # of the whole block
    unique_row_bytes: int  # of the routing rows that the samples use, each once


@dataclass(frozen=True)
class _Entry:
    """One sample in the index."""

    sample_id: str
    num_tokens: int
    weight_versions: tuple[int, ...]
    has_rows: bool


def encode_samples(samples: Sequence[TrainSample], *, num_chunks: int = 1) -> SampleBlock:
    """Encode ``samples``; with several pipeline chunks rows are stored chunk by chunk.

    Raises ``ReplayError`` when rows do not belong together or arrays differ in length,
    ``TrainerError`` when rows are of a kind that cannot be sent.
    """
    entries = [
        _Entry(s.sample_id, len(s.token_ids), s.weight_versions, s.routed_experts is not None)
        for s in samples
    ]
    index = _padded(orjson.dumps(entries))
    tokens = _padded(_token_bytes(samples))
    head = _PREFIX.pack(_MAGIC, len(index), len(tokens)) + index + tokens
    packed = _pack_rows([s for s in samples if s.routed_experts is not None], num_chunks)
    if packed is None:
        return SampleBlock([head], len(head), 0)
    return SampleBlock(
        [head, packed.header, *packed.parts()],
        len(head) + packed.nbytes,
        packed.tables.payload_bytes,
    )


def decode_samples(block: memoryview) -> list[TrainSample]:
    """The samples; arrays and rows are views of ``block``, which must outlive them.

    Raises ``TrainerError`` when this is no such block.
    """
    if len(block) < _PREFIX.size or bytes(block[: len(_MAGIC)]) != _MAGIC:
        raise TrainerError(
            f"this is no batch of samples: got={bytes(block[: len(_MAGIC)])!r} expected={_MAGIC!r}"
        )
    _, index_bytes, token_bytes = _PREFIX.unpack_from(block)
    tokens_at = _PREFIX.size + index_bytes
    rows_at = tokens_at + token_bytes
    if len(block) < rows_at:
        raise TrainerError(
            f"the batch of samples is cut short: got={len(block)} bytes expected={rows_at} or more"
        )
    entries = [_Entry(**entry) for entry in orjson.loads(block[_PREFIX.size : tokens_at])]
    arrays = _token_arrays(block[tokens_at:rows_at], sum(e.num_tokens for e in entries))
    rows = PackedRows.from_bytes(block[rows_at:]) if any(e.has_rows for e in entries) else None
    samples: list[TrainSample] = []
    start = num_packed = 0
    for entry in entries:
        stop = start + entry.num_tokens
        packed: PackedSample | None = None
        if entry.has_rows:
            assert rows is not None
            packed, num_packed = rows[num_packed], num_packed + 1
        samples.append(
            TrainSample(
                sample_id=entry.sample_id,
                weight_versions=tuple(entry.weight_versions),
                routed_experts=packed,
                **{name: array[start:stop] for name, array in arrays.items()},
            )
        )
        start = stop
    return samples


def _pack_rows(samples: Sequence[TrainSample], num_chunks: int) -> PackedRows | None:
    rows: list[SegmentRows] = []
    for sample in samples:
        if not isinstance(sample.routed_experts, SegmentRows):
            raise TrainerError(
                f"sample {sample.sample_id}: its rows cannot be sent to trainer workers: "
                f"got={type(sample.routed_experts).__name__} expected=a lease of the routing cache "
                "or ArrayRows"
            )
        rows.append(sample.routed_experts)
    if not rows:
        return None
    try:
        return pack(
            rows,
            layer_blocks=chunk_blocks(rows[0].layout, num_chunks),
            token_ids=[sample.token_ids for sample in samples],
        )
    except RoutingCacheError as error:
        raise ReplayError(f"the rows of {len(rows)} samples cannot be packed: {error}") from error


def _token_bytes(samples: Sequence[TrainSample]) -> bytes:
    for sample in samples:
        lengths = {len(getattr(sample, name)) for name in _TOKEN_ARRAYS}
        if len(lengths) != 1:
            raise ReplayError(
                f"sample {sample.sample_id}: arrays of different lengths, got={sorted(lengths)} "
                "expected=one length"
            )
    mask = np.concatenate([np.asarray(s.loss_mask, np.bool_) for s in samples])
    parts = [
        np.packbits(mask),
        np.concatenate([np.asarray(s.token_ids, np.int32) for s in samples]),
    ]
    for name in _SPARSE:
        values = np.concatenate([np.asarray(getattr(s, name), np.float32) for s in samples])
        kept = values.view(np.uint32) != 0  # by bits: a negative zero is kept as well
        parts += [np.packbits(kept), values[kept]]
    return b"".join(part.tobytes() for part in parts)


def _token_arrays(data: memoryview, num_tokens: int) -> dict[str, np.ndarray]:
    num_bit_bytes = -(-num_tokens // 8)
    at = 0

    def take(dtype: DTypeLike, count: int) -> np.ndarray:
        nonlocal at
        array = np.frombuffer(data, dtype, count, at)
        at += array.nbytes
        return array

    def take_bits() -> np.ndarray:
        return np.unpackbits(take(np.uint8, num_bit_bytes), count=num_tokens).view(np.bool_)

    arrays = {"loss_mask": take_bits(), "token_ids": take(np.int32, num_tokens)}
    for name in _SPARSE:
        kept = take_bits()
        arrays[name] = np.zeros(num_tokens, np.float32)
        arrays[name][kept] = take(np.float32, int(kept.sum()))
    return arrays


def _padded(data: bytes) -> bytes:
    """Whole words, so that the receiver can view what follows in place."""
    return data + b" " * (-len(data) % _ALIGNMENT)
