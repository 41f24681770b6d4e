"""A cache keeps copies of the rows that are new, never the reply that brought them."""

from __future__ import annotations

import gc
import weakref

import numpy as np
from cache_truth import LAYOUT, true_rows

from routing_cache import RoutingCache

TURNS = ((10, 14), (18, 22), (25, 29))  # (prompt tokens, all tokens)


def test_full_replies_are_let_go_and_cannot_change_what_is_kept() -> None:
    tokens = tuple(range(100, 129))
    cache = RoutingCache(LAYOUT)
    session = cache.session(1)
    replies: list[weakref.ref[np.ndarray]] = []
    for prompt, length in TURNS:
        reply = true_rows(1, tokens, 0, length - 1)  # the whole sequence again each turn
        session.record(
            np.array(tokens[session.num_tokens : length], np.int32),
            reply,
            start=0,
            weight_version=1,
            num_prefill=prompt,
        )
        reply[:] = 0
        replies.append(weakref.ref(reply))
        del reply
    gc.collect()
    assert [reply() for reply in replies] == [None, None, None]
    rows, present = session.lease().gather(stop=28)
    assert present.all()
    np.testing.assert_array_equal(rows, true_rows(1, tokens, 0, 28))
