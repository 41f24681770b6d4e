"""The benchmark's workload: a group of samples that share a prompt and take many turns.

48 MoE layers, 8 of 128 experts (384 bytes per row), a group of 8 samples, a prompt of 6,000 tokens,
40 turns of 300 generated and 500 observed tokens, 37,500 tokens at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from routing_cache.cache import RoutingCache
from routing_cache.layout import RowLayout, Rows, TokenIds
from routing_cache.row_check import expected_rows
from routing_cache.session import Session

LAYOUT = RowLayout(48, tuple(range(48)), num_experts=128, moe_top_k=8)
GROUP_SIZE = 8
PROMPT_TOKENS = 6_000
NUM_TURNS = 40
GENERATED = 300
OBSERVED = 500
FINAL_TOKENS = PROMPT_TOKENS + NUM_TURNS * (GENERATED + OBSERVED) - OBSERVED
TURN_ROWS = GENERATED + OBSERVED
SEED = 20_251_011


def make_rows(rng: np.random.Generator, num_rows: int) -> Rows:
    """Random rows with K distinct ids per set: an arithmetic progression with an odd step."""
    shape = (num_rows, LAYOUT.num_moe_layers, 1)
    first = rng.integers(0, 128, shape, dtype=np.uint8)
    step = rng.integers(0, 64, shape, dtype=np.uint8) * np.uint8(2) + np.uint8(1)
    return (first + step * np.arange(8, dtype=np.uint8)) % np.uint8(128)


def make_tokens(rng: np.random.Generator, num_tokens: int) -> TokenIds:
    return rng.integers(0, 150_000, num_tokens, dtype=np.int32)


class Reply(NamedTuple):
    """One turn's answer: tokens behind the session's, and rows from the suffix on."""

    new_token_ids: TokenIds
    rows: Rows
    num_prefill: int


def replies(member: int) -> Iterator[Reply]:
    """The turns of one sample of the group; the prompt's rows are the same for all."""
    prompt_rng = np.random.default_rng(SEED)
    prompt_rows = make_rows(prompt_rng, PROMPT_TOKENS)
    rng = np.random.default_rng([SEED, member + 1])
    decoded = make_rows(rng, GENERATED - 1)
    yield Reply(make_tokens(rng, GENERATED), np.concatenate([prompt_rows, decoded]), PROMPT_TOKENS)
    for _ in range(NUM_TURNS - 1):
        yield Reply(make_tokens(rng, TURN_ROWS), make_rows(rng, TURN_ROWS), OBSERVED + 1)


def prompt_tokens() -> TokenIds:
    return make_tokens(np.random.default_rng([SEED, 0]), PROMPT_TOKENS)


def recording(session: Session, reply: Reply, turn: int = 0) -> Callable[[], None]:
    """Prepare the call that records ``reply``, without rows that the session knows."""
    start = session.num_rows
    skipped = len(reply.rows) - expected_rows(session.num_tokens + len(reply.new_token_ids), start)
    return partial(
        session.record,
        reply.new_token_ids,
        reply.rows[skipped:],
        start=start,
        weight_version=1,
        num_prefill=max(0, reply.num_prefill - skipped),
        turn=turn,
    )


def play(cache: RoutingCache, member: int) -> Session:
    """Run one sample through the cache as an agent loop does."""
    session = cache.session(1, engine="bench")
    session.adopt(prompt_tokens())
    for turn, reply in enumerate(replies(member)):
        recording(session, reply, turn)()
    return session
