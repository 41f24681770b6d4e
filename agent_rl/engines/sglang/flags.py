"""SGLang settings that make routing rows wrong or useless, and what to change.

Sources: SGLang 0.5.23's own code and its issue threads; each rule names its mechanism.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

ServerInfo = Mapping[str, object]  # what GET /server_info answers


def find_hazards(info: ServerInfo) -> Iterator[str]:
    """Yield one line for every setting that replay cannot live with."""
    for key, is_safe, why in _RULES:
        value = info.get(key)
        if value not in is_safe:
            yield f"{_flag(key)}: got {value!r}; {why}"
    chunk, running = info.get("chunked_prefill_size"), info.get("max_running_requests")
    if isinstance(chunk, int) and chunk <= 0:
        yield (
            f"{_flag('chunked_prefill_size')}: got {chunk}; the capture buffer is as long as a "
            "chunk, and an unchunked prompt overruns it: set it above 0"
        )
    if isinstance(running, int) and running <= 0:
        yield f"{_flag('max_running_requests')}: got {running}, expected above 0"


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


_OFF = (None, False, 0, "", "null", "none", "off")
_RULES: tuple[tuple[str, tuple[object, ...], str], ...] = (
    (
        "enable_hierarchical_cache",
        _OFF,
        "rows are kept by KV slot and do not travel to the host cache with the KV, so a hit there "
        "returns another token's rows: turn it off",
    ),
    (
        "enable_lmcache",
        _OFF,
        "KV fetched from outside has no rows in this server: turn it off",
    ),
    (
        "speculative_algorithm",
        _OFF,
        "verified draft tokens pass the router in another batch than the capture expects, and a "
        "draft model is not updated with the policy: turn it off",
    ),
    (
        "disaggregation_mode",
        _OFF,
        "a decode node never ran the prompt and has no rows of it: serve prefill and decode "
        "together",
    ),
    (
        "enable_two_batch_overlap",
        _OFF,
        "the capture writes one batch's rows over the other's: turn it off",
    ),
    (
        "weight_cache_mode",
        _OFF,
        "weights shared through the cache daemon cannot be updated in place: set it to off",
    ),
    (
        "disable_radix_cache",
        _OFF,
        "every turn would prefill the whole conversation again, and recompute its rows: leave "
        "the radix cache on",
    ),
    (
        "load_format",
        ("auto", "safetensors", "pt", None),
        "rows of dummy or remote weights are not the policy's: load the checkpoint",
    ),
    (
        "preferred_sampling_params",
        _OFF,
        "the server would change the distribution that the trainer scores: remove it",
    ),
)
