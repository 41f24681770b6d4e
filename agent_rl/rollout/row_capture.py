"""Routing rows on their way from an engine's replies into the cache."""

from __future__ import annotations

import numpy as np

from agent_rl.protocols import Generator
from agent_rl.rollout.replies import check_overlap
from agent_rl.types import Completion, RoutedRows, TokenIds
from routing_cache import RoutingCache, Session


class RowCapture:
    """Routing rows of one token sequence: asked for where the cache ends, recorded as they come.

    ``details`` tells how often rows came again, and how well they agreed.
    """

    def __init__(self, cache: RoutingCache, generator: Generator) -> None:
        self._cache, self._generator = cache, generator
        self._session: Session | None = None
        self._num_turns = 0
        self.details: dict[str, str | int | float] = {}

    def begin(self, prompt: TokenIds) -> None:
        """Open the cache's session on the first ``prompt`` ``[T]``, with the rows known for it."""
        version, engine = self._generator.weight_version, self._generator.name
        self._session = self._cache.session(version, engine=engine)
        self._session.adopt(prompt)

    @property
    def next_row(self) -> int:
        """The first row to ask the engine for, an absolute token index."""
        assert self._session is not None
        return self._session.num_rows

    def record(self, prompt: TokenIds, completion: Completion) -> None:
        """Store the rows of a checked reply to ``prompt`` ``[T]``.

        Bad rows become missing and are counted; those of a reply without any are asked for again
        in the next turn. Raises EngineError for rows that came again and are of other tokens.
        """
        session = self._session
        assert session is not None
        self._compare(session, completion)
        whole = np.concatenate([prompt, completion.token_ids]).astype(np.int32)
        session.record(
            whole[session.num_tokens :],
            completion.routed_experts,
            start=completion.routed_experts_start,
            weight_version=completion.weight_versions[-1],
            num_prefill=len(prompt) - completion.routed_experts_start,
            turn=self._num_turns,
        )
        self._num_turns += 1

    def close(self, *, keep: bool) -> RoutedRows | None:
        """End the session; with ``keep`` return a lease on what it holds."""
        if self._session is None:
            return None
        lease = self._session.lease() if keep else None
        self._session.close()
        return lease

    def _compare(self, session: Session, completion: Completion) -> None:
        """Refuse rows that came again, after a move to another engine, and are of other tokens.

        Single differences are counted by the cache.
        """
        num_stored = session.num_rows
        if completion.routed_experts_start >= num_stored:
            return
        with session.lease() as stored:
            found = check_overlap(stored, num_stored, completion, self._cache.layout)
        compared = int(self.details.get("rows_compared", 0))
        self.details["rows_compared"] = found.num_compared + compared
        least = float(self.details.get("rows_shared_least", 1.0))
        self.details["rows_shared_least"] = min(found.shared, least)
