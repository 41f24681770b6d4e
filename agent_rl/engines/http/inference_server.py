"""Abilities of an inference server, whatever its dialect. One implementation per dialect.

``HttpEngine`` adds on top what does not depend on the server: gates, versions, row arithmetic,
seam checks, counters.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agent_rl.protocols import Weights
from agent_rl.types import FinishReason, Floats, GenerateRequest, Rows, TokenIds


@dataclass(frozen=True)
class ServerFacts:
    """A server's word about itself. ``hazards``: one line for every unsafe setting, with the
    change that makes it safe; empty when rows may be replayed."""

    engine: str  # "sglang", "vllm"
    version: str
    model_path: str
    context_length: int
    weight_version: str
    captures_routing: bool
    num_workers: int = 1  # ranks that load weights: tensor x pipeline parallel
    hazards: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServerReply:
    """One answer, decoded but not judged."""

    request_id: str
    token_ids: TokenIds  # [N]
    logprobs: Floats  # [N]
    finish_reason: FinishReason
    num_prompt_tokens: int
    weight_versions: tuple[str, ...]  # as named by the server; empty if it does not say
    cached_tokens: int = 0
    num_retractions: int = 0
    rows: Rows | None = None  # [R, L, K] canonical, of tokens [rows_start, rows_start + R)
    rows_start: int = 0
    num_row_bytes: int = 0  # as they came over the wire
    full_logprobs: Floats | None = None  # [N, V] when asked for


class InferenceServer(Protocol):
    """A server that turns token ids into token ids."""

    @property
    def engine(self) -> str: ...

    @property
    def url(self) -> str: ...

    @property
    def gives_full_logprobs(self) -> bool:
        """True where ``return_full_logprobs`` can be served."""
        ...

    @property
    def seeds_by_position(self) -> bool:
        """True where one seed gives other draws at other positions. Elsewhere every request
        begins the same stream of draws, and the turns of an episode would repeat each other's."""
        ...

    async def facts(self) -> ServerFacts:
        """Ask the server about itself. Raises ``EngineUnavailableError`` while it is not up."""
        ...

    async def generate(self, request: GenerateRequest, request_id: str) -> ServerReply: ...

    async def score(self, token_ids: TokenIds) -> Floats:
        """Return log-probs ``[T-1]`` at temperature 1 of tokens 1..T-1; fills no
        cache that matters to anyone."""
        ...

    async def abort(self, request_id: str) -> None: ...

    async def pause(self) -> None:
        """Stop scheduling. Running requests are ended as aborted."""
        ...

    async def resume(self) -> None: ...

    async def flush(self) -> None:
        """Drop the whole prefix cache. Raises ``EngineError`` when the server did not."""
        ...

    async def push_tensors(self, weights: Weights, version: int) -> None:
        """Send weights through the connection and flush. Engine must be paused."""
        ...

    async def load_folder(self, folder: Path, version: int) -> None:
        """Have the server read a Hugging Face folder that it can see, and flush."""
        ...

    async def name_version(self, version: int) -> None:
        """Set the version that replies carry, without touching the weights."""
        ...

    async def aclose(self) -> None: ...
