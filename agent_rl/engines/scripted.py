"""Generator that says what a script tells it: for tests, and for agents written by hand.

Log-probabilities and routing rows are synthetic but well-formed: row p depends on the tokens
0..p and the weight version only, as real rows do, so shared prefixes agree.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np

from agent_rl.errors import EngineError
from agent_rl.protocols import Weights
from agent_rl.types import Completion, FinishReason, GenerateRequest, Rows, TokenIds
from routing_cache import RowLayout

Script = Callable[[GenerateRequest, int], TokenIds]
"""Ids to say for a request, given how many completions its session has had. May raise."""

_DEFAULT_LAYOUT = RowLayout(num_hidden_layers=2, moe_layers=(0, 1), num_experts=8, moe_top_k=2)


class ScriptedGenerator:
    """``Generator`` without a model.

    Args:
        script: what to say; see ``Script``. Cut at the request's ``max_new_tokens``.
        layout: shape of the synthetic rows.
    """

    def __init__(self, script: Script, *, layout: RowLayout = _DEFAULT_LAYOUT) -> None:
        self._script = script
        self._layout = layout
        self._version = 0
        self._num_turns: dict[str, int] = {}
        self.requests: list[GenerateRequest] = []

    @property
    def name(self) -> str:
        return "scripted"

    @property
    def row_layout(self) -> RowLayout:
        return self._layout

    @property
    def weight_version(self) -> int:
        return self._version

    @property
    def open_sessions(self) -> set[str]:
        """Sessions that were used and not ended."""
        return set(self._num_turns)

    async def generate(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        turn = self._num_turns.get(request.session_id, 0)
        self._num_turns[request.session_id] = turn + 1
        said = self._script(request, turn)[: request.sampling.max_new_tokens].astype(np.int32)
        if not said.size:
            raise EngineError(f"the script said nothing in turn {turn} of {request.session_id!r}")
        stopped = int(said[-1]) in request.sampling.stop_token_ids
        reason: FinishReason = "stop" if stopped else "length"
        start = request.routed_experts_start
        rows = None
        if start is not None:
            fed = np.concatenate([request.token_ids, said[:-1]]).astype(np.int32)
            rows = synthetic_rows(fed, self._layout, self._version)[start:]
        return Completion(
            token_ids=said,
            logprobs=np.full(len(said), -0.5, dtype=np.float32),
            finish_reason=reason,
            weight_versions=(self._version,),
            routed_experts=rows,
            routed_experts_start=start or 0,
            engine=self.name,
        )

    async def end_session(self, session_id: str) -> None:
        self._num_turns.pop(session_id, None)

    async def load_weights(self, weights: Weights, version: int) -> None:
        del weights  # a script has none
        self._version = version

    async def aclose(self) -> None:
        self._num_turns.clear()


def synthetic_rows(token_ids: TokenIds, layout: RowLayout, weight_version: int) -> Rows:
    """Return rows ``[T, L, K]`` that are a function of each prefix, K distinct ids per layer."""
    num_layers, moe_top_k = layout.num_moe_layers, layout.moe_top_k
    rows = np.empty((len(token_ids), num_layers, moe_top_k), dtype=np.int64)
    state = zlib.crc32(str(weight_version).encode())
    for p, token in enumerate(token_ids.tolist()):
        state = zlib.crc32(token.to_bytes(4, "little"), state)
        first = state + np.arange(num_layers)[:, None] * 7
        rows[p] = (first + np.arange(moe_top_k)) % layout.num_experts
    return rows.astype(layout.dtype)
