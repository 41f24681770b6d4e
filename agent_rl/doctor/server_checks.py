"""What a configuration's inference servers still need on this machine; starts nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx

from agent_rl.config.schema import RunConfig
from agent_rl.doctor.check import counted
from agent_rl.engines.http.process import engines_dir
from agent_rl.errors import ConfigError
from agent_rl.model.policies import policy_folder
from agent_rl.model.served import read_served_model

_CHECK_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class ServerFinding:
    """One finding; ``advice`` says what to do about it."""

    name: str
    verdict: Literal["ok", "warning", "missing"]
    detail: str
    advice: str = ""


def check_servers(config: RunConfig) -> Iterator[ServerFinding]:
    """Environment, devices or reachable URLs, and a model that servers can serve."""
    engine = config.engine
    if engine.kind == "local":
        return
    yield from _model(config)
    if engine.urls:
        for url in engine.urls:
            yield _reachable(url)
        return
    python = engines_dir() / engine.kind / "bin" / "python"
    yield ServerFinding(
        f"{engine.kind} environment",
        "ok" if python.is_file() else "missing",
        str(python.parent.parent),
        "" if python.is_file() else f"scripts/engines/install.sh {engine.kind}",
    )
    if engine.device == "cuda":
        wanted = engine.num_servers * engine.tensor_parallel
        yield _devices(wanted)


def _model(config: RunConfig) -> Iterator[ServerFinding]:
    try:
        folder = policy_folder(config.policy.path)
        layout = read_served_model(folder).layout
    except ConfigError as error:
        yield ServerFinding("served model", "missing", error.problems[0], "set policy.path")
        return
    detail = (
        f"{counted(layout.num_moe_layers, 'MoE layer')}, "
        f"{layout.moe_top_k} of {counted(layout.num_experts, 'expert')} a token"
    )
    yield ServerFinding("served model", "ok", detail)
    tied = json.loads((folder / "config.json").read_text()).get("tie_word_embeddings", False)
    if tied and config.engine.urls:
        yield ServerFinding(
            "served model's head",
            "warning",
            "tied embeddings: SGLang samples from dead logits without lm_head.weight",
            "serve a folder written by agent_rl.engines.http.weight_export.prepare_serving_folder",
        )


def _reachable(url: str) -> ServerFinding:
    try:
        reply = httpx.get(f"{url.rstrip('/')}/health", timeout=_CHECK_TIMEOUT_S, trust_env=False)
    except httpx.TransportError as error:
        detail = f"{type(error).__name__}: {error}"
        return ServerFinding(url, "missing", detail, "start the server, or correct engine.urls")
    if reply.status_code != 200:
        return ServerFinding(url, "missing", f"status {reply.status_code}", "read the server's log")
    return ServerFinding(url, "ok", "healthy")


def _devices(wanted: int) -> ServerFinding:
    # Through the driver's own files: torch here may be a CPU build and see no device.
    found = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return ServerFinding(
        "GPUs for servers",
        "ok" if found >= wanted else "missing",
        f"{counted(found, 'GPU')} here, {wanted} needed by the servers",
        "" if found >= wanted else "lower engine.num_servers or engine.tensor_parallel",
    )
