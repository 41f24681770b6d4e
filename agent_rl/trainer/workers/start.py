"""The trainer that a configuration names: in this process, or over several."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from agent_rl.config.schema import RunConfig
from agent_rl.protocols import Trainer
from agent_rl.trainer.workers.trainer_fleet import TrainerFleet
from agent_rl.trainer.workers.worker_group import WorkerGroup
from agent_rl.trainer.workers.world import launcher


def start_trainer(config: RunConfig, model_path: Path) -> Trainer:
    """Build the trainer where ``trainer.launcher`` says; returns when every rank is ready."""
    name = launcher(config.trainer)
    if name == "inline":
        from agent_rl.trainer.megatron import MegatronTrainer

        return MegatronTrainer(config, model_path)
    return TrainerFleet(config, GROUPS[name](config, model_path))


def _local(config: RunConfig, model_path: Path) -> WorkerGroup:
    from agent_rl.trainer.workers.local import LocalWorkers

    return LocalWorkers(config, model_path)


def _ray(config: RunConfig, model_path: Path) -> WorkerGroup:
    from agent_rl.trainer.workers.ray_workers import RayWorkers

    return RayWorkers(config, model_path)


GROUPS: dict[str, Callable[[RunConfig, Path], WorkerGroup]] = {"local": _local, "ray": _ray}
