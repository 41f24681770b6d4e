"""Estimate of the prefixes that each engine has warm, kept here by hashes of token blocks."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable

from agent_rl.types import TokenIds

BLOCK_TOKENS = 16


class PrefixIndex:
    """Remembers up to ``max_blocks`` blocks per engine, least recently used first out. Mutable.

    A block's key is a hash over all tokens up to its end, so equal keys mean equal prefixes.
    """

    def __init__(self, num_engines: int, max_blocks: int = 65536) -> None:
        self._blocks: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(num_engines)]
        self._max_blocks = max_blocks

    def add(self, engine: int, token_ids: TokenIds) -> None:
        """Note that ``token_ids`` is, or will be, in the engine's prefix cache."""
        blocks = self._blocks[engine]
        for key in _keys(token_ids):
            blocks[key] = None
            blocks.move_to_end(key)
        while len(blocks) > self._max_blocks:
            blocks.popitem(last=False)

    def warm_tokens(self, token_ids: TokenIds, engines: Iterable[int]) -> dict[int, int]:
        """Return the tokens of the longest known prefix by engine, in whole blocks."""
        candidates = set(engines)
        warm = dict.fromkeys(candidates, 0)
        for number, key in enumerate(_keys(token_ids), 1):
            candidates = {engine for engine in candidates if key in self._blocks[engine]}
            if not candidates:
                break
            warm |= dict.fromkeys(candidates, number * BLOCK_TOKENS)
        return warm

    def forget(self, engine: int) -> None:
        """Forget an engine's cache: it restarted, or its weights changed."""
        self._blocks[engine].clear()


def _keys(token_ids: TokenIds) -> Iterable[bytes]:
    digest = hashlib.blake2b(digest_size=16)
    whole = len(token_ids) - len(token_ids) % BLOCK_TOKENS
    for start in range(0, whole, BLOCK_TOKENS):
        digest.update(token_ids[start : start + BLOCK_TOKENS].tobytes())
        yield digest.digest()
