"""Digests that bind rows to their token ids, position and weight version.

Every row gets a keyed 64-bit digest; a range's digest is the sum of its rows' digests modulo
2**64. Ranges can therefore be cut and joined at will without touching the rows again, and a
mismatch names the row.

The row hash is a pair of multilinear hashes (Lemire & Kaser, "Strongly universal string hashing
is fast", 2013) modulo 2**64, one over the row's words and one over the same words with their
bytes reversed, mixed with token id, position and version. A sum of keyed products misses a
difference whose lowest bit is t with odds 2**(t-64); reversing the bytes makes a high t low in
the other hash, so together they miss 2**-60 at worst up to 128 experts and 2**-58 above.
It guards against accidents, not against an adversary; storage adds a cryptographic hash.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routing_cache.layout import RowLayout, Rows, TokenIds

Digests = NDArray[np.uint64]  # [T] one for each row

DEFAULT_KEY = 0x5EED_0F_0A7E_C0DE
_MASK = (1 << 64) - 1
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_32 = np.uint64(32)
_SHIFT_29 = np.uint64(29)


def splitmix64(seed: int, count: int) -> NDArray[np.uint64]:
    """``count`` words of the SplitMix64 generator (Steele, Lea & Flood, 2014) from ``seed``."""
    state = np.uint64(seed & _MASK) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(
        0x9E3779B97F4A7C15
    )
    state = (state ^ (state >> np.uint64(30))) * _MULTIPLIER_1
    state = (state ^ (state >> np.uint64(27))) * _MULTIPLIER_2
    return state ^ (state >> np.uint64(31))


def _word_size(set_bytes: int) -> int:
    """Return the widest word that never straddles layers: any run of them is then hashable."""
    return next(size for size in (8, 4, 2, 1) if set_bytes % size == 0)


class Digester:
    """Computes row digests for one layout and key. Immutable, safe to share between threads."""

    def __init__(self, layout: RowLayout, key: int = DEFAULT_KEY) -> None:
        self.key = key & _MASK
        set_bytes = layout.moe_top_k * layout.dtype.itemsize
        size = _word_size(set_bytes)
        self._words_per_layer = set_bytes // size
        self._word = np.dtype(f"<u{size}")
        self._reversed_word = np.dtype(f">u{size}")
        num_words = layout.num_moe_layers * self._words_per_layer
        keys = splitmix64(key, 2 * num_words + 3)
        self._forward, self._backward = keys[:num_words], keys[num_words : 2 * num_words]
        token_key, position_key, version_key = keys[2 * num_words :] | np.uint64(1)
        self._token_key, self._position_key = token_key, position_key
        self._version_key = int(version_key)

    def rows(
        self,
        rows: Rows,
        token_ids: TokenIds,
        *,
        start: int,
        weight_version: int,
        first_layer: int = 0,
    ) -> Digests:
        """Compute digests ``[T]`` of rows ``[T, l, K]`` of the tokens from index ``start`` on.

        ``first_layer`` is the L index of the block's first layer when it holds only a run of them.
        """
        num_rows = len(rows)
        if num_rows == 0:
            return np.empty(0, np.uint64)
        words = rows.reshape(num_rows, -1).view(self._word)
        low = first_layer * self._words_per_layer
        high = low + words.shape[1]
        forward, backward = np.empty((2, num_rows), np.uint64)
        step = max(1, _CHUNK_BYTES // (words.shape[1] * words.itemsize))
        for at in range(0, num_rows, step):
            part = words[at : at + step]
            _product(part, self._forward[low:high], forward[at : at + step])
            swapped = _scratch.take(part.shape, self._reversed_word)
            # Assigning into a big-endian array and reading it back as little-endian reverses
            # bytes in one pass; ndarray.byteswap takes four times as long.
            swapped[...] = part
            reverse = swapped.view(self._word)
            _product(reverse, self._backward[low:high], backward[at : at + step])
        position = np.arange(start, start + num_rows, dtype=np.uint64)
        position *= self._position_key
        forward += position
        forward += token_ids.astype(np.uint64) * self._token_key
        forward += np.uint64(self._version_key * weight_version & _MASK)
        return _mix(forward, backward)


class _Scratch(threading.local):
    """A buffer that stays allocated: a fresh one costs more in page faults than the hash."""

    def __init__(self) -> None:
        self.data = np.empty(0, np.uint8)

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        num_bytes = shape[0] * shape[1] * dtype.itemsize
        if len(self.data) < num_bytes:
            self.data = np.empty(num_bytes, np.uint8)
        return self.data[:num_bytes].view(dtype).reshape(shape)


_scratch = _Scratch()
_CHUNK_BYTES = 1 << 19


def _product(words: NDArray[np.unsignedinteger], keys: Digests, out: Digests) -> None:
    if words.dtype.itemsize != 8:
        words = words.astype(np.uint64)
    np.einsum("ij,j->i", words, keys, out=out)


def _mix(state: Digests, other: Digests) -> Digests:
    """Mix two states, nonlinear and bijective in each, so that sums of digests look random."""
    # A difference in the top bits of ``state`` must reach every bit before ``other`` comes in:
    # ``other`` may differ in few bits only, which an unscrambled ``state`` would hit too often.
    state ^= state >> _SHIFT_32
    state *= _MULTIPLIER_1
    state ^= state >> _SHIFT_29
    state *= _MULTIPLIER_2
    state ^= state >> _SHIFT_32
    state ^= other
    state *= _MULTIPLIER_1
    state ^= state >> _SHIFT_29
    state *= _MULTIPLIER_2
    state ^= state >> _SHIFT_32
    return state


def total(digests: Digests) -> int:
    """Return the digest of a range: the sum of its rows' digests modulo 2**64."""
    return int(np.add.reduce(digests, dtype=np.uint64))


def rows_digest(
    rows: Rows,
    layout: RowLayout,
    token_ids: TokenIds | None = None,
    *,
    start: int = 0,
    weight_version: int = 0,
) -> int:
    """Digest a whole block under the default key; its rows alone without ``token_ids``."""
    ids = np.zeros(len(rows), np.int32) if token_ids is None else token_ids
    return total(Digester(layout).rows(rows, ids, start=start, weight_version=weight_version))


def join(*parts: int) -> int:
    """Return the digest of adjoining ranges."""
    return sum(parts) & _MASK


def tail_digest(tokens: bytes, start: int, key: int) -> int:
    """Hash the tokens that have no row (int32 bytes, first absolute index ``start``)."""
    ids = np.frombuffer(tokens, np.int32)
    position_key, token_key = (int(k) | 1 for k in splitmix64(key ^ _MASK, 2))
    digest = 0
    for index, token in enumerate(ids.tolist(), start):
        state = np.array([(index * position_key + token * token_key) & _MASK], np.uint64)
        digest += int(_mix(state, state.copy())[0])
    return digest & _MASK
