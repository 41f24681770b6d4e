"""Sessions whose prompts share a beginning, recording in any order, keep their own rows."""

import random

import numpy as np
import pytest

from routing_cache import RoutingCache, RowLayout

LAYOUT = RowLayout(num_hidden_layers=2, moe_layers=(0, 1), num_experts=32, moe_top_k=4)


def _true_rows(tokens: list[int]) -> np.ndarray:
    """Row p as a function of tokens 0..p alone, as a causal model's rows are. [T-1, L, K]"""
    rows = []
    for p in range(len(tokens) - 1):
        rng = np.random.default_rng(tokens[: p + 1])
        rows.append([rng.permutation(32)[:4] for _ in LAYOUT.moe_layers])
    return np.array(rows, np.uint8).reshape(-1, 2, 4)


@pytest.mark.parametrize("seed", range(30))
def test_rows_beyond_the_shared_part_are_never_taken_from_a_neighbour(seed: int) -> None:
    """A match that ends inside an edge must not bring the rest of that edge along."""
    rng = random.Random(seed)
    cache = RoutingCache(LAYOUT)
    stems = [[*range(1, rng.randint(3, 7)), 10 + g, rng.randint(20, 22)] for g in (0, 1, 2)]
    sessions = []
    for stem in (stem for stem in stems for _ in range(2)):
        session = cache.session(0)
        session.adopt(np.array(stem, np.int32))
        sessions.append((session, list(stem)))
    for turn in range(3):
        for session, tokens in rng.sample(sessions, len(sessions)):
            if turn:
                tokens += [50, 51]
            prompt = len(tokens)
            tokens += [rng.randint(30, 40) for _ in range(rng.randint(1, 3))]
            start = session.num_rows
            session.record(
                np.array(tokens[session.num_tokens :], np.int32),
                _true_rows(tokens)[start:],
                start=start,
                weight_version=0,
                num_prefill=prompt - start,
                turn=turn,
            )
    for session, tokens in sessions:
        lease = session.lease()
        lease.verify(np.array(tokens, np.int32))
        rows, present = lease.gather()
        assert present[:-1].all()
        np.testing.assert_array_equal(rows[:-1], _true_rows(tokens))
