"""What ``eval`` and ``rollout`` accept: a run folder, or a configuration file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agent_rl.config import RunConfig
from agent_rl.config_io import load_config
from agent_rl.errors import CheckpointError, ConfigError
from agent_rl.policies import policy_folder
from agent_rl.trainer.checkpoint import CheckpointStore, damage


@dataclass(frozen=True)
class PolicySource:
    """A configuration and the policy to play it with."""

    config: RunConfig
    policy: Path
    description: str


def open_source(path: Path, overrides: Sequence[str], step: int | None = None) -> PolicySource:
    """A run's checkpoint (the newest verified, or that of ``step``), or a config's own policy.

    Raises ``CheckpointError`` for a step that is absent or damaged, ``ConfigError`` otherwise.
    """
    if not path.exists():
        raise ConfigError(
            [f"{path}: no such file or folder (expected a run folder or a YAML config)"]
        )
    if path.is_dir() and not (path / "config.yaml").is_file():
        raise ConfigError([f"{path}: no run folder: expected config.yaml in it, or a YAML config"])
    if not path.is_dir():
        config = load_config(path, overrides)
        return PolicySource(config, policy_folder(config.policy.path), config.policy.path)
    config = load_config(path / "config.yaml", overrides)
    store = CheckpointStore(path / "checkpoints")
    if step is not None:
        folder = path / "checkpoints" / f"step-{step:08d}"
        reason = damage(folder) if step in store.steps() else "no such checkpoint"
        if reason is not None:
            raise CheckpointError(
                f"step {step} of {path} cannot be used: got={reason} "
                f"expected=one of {store.steps()}"
            )
        return PolicySource(config, folder, f"{path}, step {step}")
    found = store.latest()
    if found is None:
        raise CheckpointError(f"{path} has no checkpoint yet: got=none expected=at least one")
    return PolicySource(config, found.folder, f"{path}, step {found.step}")
