"""How a server is used, and what is counted while it is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from agent_rl.engines.http.inference_server import ServerReply


@dataclass(frozen=True)
class EngineOptions:
    """How one server is used.

    ``weight_transfer``: "tensors" sends them through the connection (the server may be anywhere,
    but every update travels as a request body), "disk" writes a folder below ``exchange`` that the
    server must see under the same path.
    """

    name: str = "engine"
    max_running: int = 64
    capture_routing: bool = True
    weight_transfer: Literal["tensors", "disk"] = "tensors"
    exchange: Path | None = None
    template: Path | None = None  # config and tokenizer of such a folder; None: the server's model
    drain_timeout_s: float = 120.0
    verify_tolerance: float = 1e-4  # of log-probs after an update, when a reference is given


@dataclass
class EngineStats:
    """Counters since the start. Rows and bytes are as asked for and as received."""

    requests: int = 0
    completions: int = 0
    resends: int = 0
    aborts: int = 0
    unavailable: int = 0
    refused: int = 0
    bad_replies: int = 0
    foreign_rows: int = 0
    seams_checked: int = 0
    seams_recomputed: int = 0
    retractions: int = 0
    mixed_versions: int = 0
    stale_replies: int = 0
    weight_updates: int = 0
    failed_updates: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    rows_fetched: int = 0
    row_bytes: int = 0  # base64, as on the wire

    def count(self, reply: ServerReply, num_rows: int) -> None:
        """Note an accepted reply of which ``num_rows`` rows were asked for."""
        self.completions += 1
        self.prompt_tokens += reply.num_prompt_tokens
        self.cached_tokens += reply.cached_tokens
        self.sampled_tokens += len(reply.token_ids)
        self.row_bytes += reply.num_row_bytes
        self.rows_fetched += num_rows

    def to_metrics(self, prefix: str) -> dict[str, float]:
        """Every counter as ``{prefix}_{name}``."""
        return {f"{prefix}_{name}": float(value) for name, value in asdict(self).items()}
