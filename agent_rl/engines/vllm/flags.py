"""vLLM settings that make routing rows or log-probs wrong, and what to change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def find_hazards(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line for every setting of ``vllm_config`` that replay cannot live with."""
    model, cache = config["model_config"], config["cache_config"]
    mode = model.get("logprobs_mode")
    if mode != "processed_logprobs":
        yield (
            f"--logprobs-mode: got {mode!r}; raw log-probs leave the temperature out, and the "
            "importance ratio would be of another distribution: set it to processed_logprobs"
        )
    if config.get("speculative_config"):
        yield (
            "--speculative-config: got a draft model; it is not updated with the policy, and "
            "verified drafts pass the router in another batch: remove it"
        )
    if config.get("kv_transfer_config"):
        yield (
            "--kv-transfer-config: got a connector; KV that was computed elsewhere has no rows "
            "here: remove it"
        )
    if cache.get("kv_offloading_size"):
        yield (
            f"--kv-offloading-size: got {cache['kv_offloading_size']}; rows do not travel with "
            "offloaded blocks: remove it"
        )
    if cache.get("enable_prefix_caching") is not True:
        yield (
            "--enable-prefix-caching: got it off; every turn would prefill the whole conversation "
            "again, and recompute its rows: turn it on"
        )
    if config["parallel_config"].get("enable_eplb"):
        yield "--enable-eplb: got it on; captured ids would be of physical experts: turn it off"
