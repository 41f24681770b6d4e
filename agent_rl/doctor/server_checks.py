"""Check what a configuration's inference servers still need on this machine; starts nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx

from agent_rl.config.schema import RunConfig
from agent_rl.doctor.check import Check, counted
from agent_rl.errors import ConfigError
from agent_rl.model.config_json import read_served_model
from agent_rl.model.policies import policy_folder

_CHECK_TIMEOUT_S = 5.0


def check_servers(config: RunConfig) -> Iterator[Check]:
    """Check the model that is served, and devices or URLs; a rule looks for the environment."""
    engine = config.engine
    if engine.kind == "local":
        return
    yield from _model(config)
    if engine.urls:
        for url in engine.urls:
            yield _reachable(url)
        return
    if engine.device == "cuda":
        wanted = engine.num_servers * engine.tensor_parallel
        yield _devices(wanted)


def _model(config: RunConfig) -> Iterator[Check]:
    try:
        model = read_served_model(policy_folder(config.policy.path))
    except ConfigError:
        return  # a rule says so
    layout = model.layout
    detail = (
        f"{counted(layout.num_moe_layers, 'MoE layer')}, "
        f"{layout.moe_top_k} of {counted(layout.num_experts, 'expert')} per token"
    )
    yield Check("served model", "ok", detail)
    if model.tie_embeddings and config.engine.urls:
        yield Check(
            "served model's head",
            "warning",
            "tied embeddings: SGLang samples from dead logits without lm_head.weight",
            "serve a folder written by agent_rl.engines.http.serving_folder.prepare_serving_folder",
        )


def _reachable(url: str) -> Check:
    try:
        reply = httpx.get(f"{url.rstrip('/')}/health", timeout=_CHECK_TIMEOUT_S, trust_env=False)
    except httpx.TransportError as error:
        detail = f"{type(error).__name__}: {error}"
        return Check(url, "missing", detail, "start the server, or correct engine.urls")
    if reply.status_code != 200:
        return Check(url, "missing", f"status {reply.status_code}", "read the server's log")
    return Check(url, "ok", "healthy")


def _devices(wanted: int) -> Check:
    # Through the driver's own files: torch here may be a CPU build and see no device.
    found = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return Check(
        "GPUs for servers",
        "ok" if found >= wanted else "missing",
        f"{counted(found, 'GPU')} here, {wanted} needed by the servers",
        "" if found >= wanted else "lower engine.num_servers or engine.tensor_parallel",
    )
