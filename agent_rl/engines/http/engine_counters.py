"""Counts of what becomes of the requests to one server."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from agent_rl.engines.http.inference_server import ServerReply


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
        """Return every counter as ``{prefix}_{name}``."""
        return {f"{prefix}_{name}": float(value) for name, value in asdict(self).items()}
