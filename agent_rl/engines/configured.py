"""The engine that a configuration names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from agent_rl.config.schema import RunConfig
from agent_rl.protocols import Generator


def build_engine(config: RunConfig, policy: Path) -> Generator:
    """Build the engine of ``config.engine`` over the folder ``policy``; starts no server yet."""
    return ENGINES[config.engine.kind](config, policy)


def _local(config: RunConfig, policy: Path) -> Generator:
    from agent_rl.engines.local import LocalEngine

    return LocalEngine(policy, config.engine, max_tokens=config.agent.max_tokens)


def _served(config: RunConfig, policy: Path) -> Generator:
    from agent_rl.engines.http.deployment import Deployment
    from agent_rl.engines.http.server_fleet import ServerFleet

    root = Path(config.run_root).resolve() / "engines"
    return ServerFleet(
        Deployment(
            config.engine,
            policy,
            work_dir=root / f"{config.name}-{os.getpid()}",
            context_length=config.agent.max_tokens + 1,
            refuse_bad_rows=config.routing.replay == "r3",
        )
    )


ENGINES: dict[str, Callable[[RunConfig, Path], Generator]] = {
    "local": _local,
    "sglang": _served,
    "vllm": _served,
}
