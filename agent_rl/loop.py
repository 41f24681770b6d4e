"""The RL loop, on one page.

One step::

    tasks ──► collect ──► build ──► trainer.step ──► publish ──► engine.load_weights
              │  ▲                                                    │
              ▼  │ rows, log-probs                                    ▼
           sandbox, engine                             cache.retire(older versions)

Rollout and training take turns, or with ``train.overlap_rollout`` work side by side on neighbouring
steps. Who waits for whom, and what a Ctrl-C leaves of a step, is in ``rollout/ahead.py``. Weights
change while no request is in flight, so one weight version samples a whole step.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from agent_rl.config import RunConfig
from agent_rl.metrics.probe import probe_mismatch
from agent_rl.metrics.rollout_metrics import rollout_metrics
from agent_rl.protocols import Generator, Trainer
from agent_rl.rollout.ahead import RolloutAhead
from agent_rl.rollout.dynamic_sampling import Collector, collect_groups
from agent_rl.rollout.samples import build_samples
from agent_rl.tasks.curriculum import Curriculum
from agent_rl.types import Group, TrainSample
from envs.base import Task
from routing_cache import RoutingCache


class StepObserver(Protocol):
    """Told after every step, before the next begins: logging, checkpoints, stop requests."""

    def step_done(self, step: int, groups: Sequence[Group], metrics: dict[str, float]) -> bool:
        """Record the step; return True to stop here."""
        ...


@dataclass(frozen=True)
class LoopParts:
    """Everything that takes part in a step."""

    config: RunConfig
    curriculum: Curriculum[Task]
    collect: Collector
    engine: Generator
    trainer: Trainer
    routing: RoutingCache
    # Every train.eval_every steps.
    evaluate: Callable[[], Awaitable[dict[str, float]]] | None = None


async def train_steps(parts: LoopParts, observer: StepObserver, *, first_step: int) -> None:
    """Run steps ``first_step`` to ``config.train.steps``.

    Cancelled while or after the weights move, it still records the step in progress: steps before
    it that no checkpoint holds could not be saved otherwise.
    """
    config = parts.config
    collect = partial(collect_groups, parts.collect, parts.curriculum, config)
    async with RolloutAhead(collect, config.train) as rollouts:
        for step in range(first_step, config.train.steps + 1):
            async with rollouts.take(step) as batch:
                samples = build_samples(batch.groups, config)
                metrics = rollout_metrics(batch.groups, config.rollout.min_valid_members)
                if samples:  # equal rewards teach nothing: such a step leaves the weights alone
                    metrics |= await batch.beside_rollout(partial(update, parts, samples, step))
                    await batch.between_rollouts(partial(load_newest, parts))
                if parts.evaluate is not None and is_due(step, config.train.eval_every):
                    metrics |= await batch.between_rollouts(parts.evaluate) or {}
                stop = observer.step_done(step, batch.groups, metrics | batch.times())
            if stop:
                return


def update(parts: LoopParts, samples: Sequence[TrainSample], step: int) -> dict[str, float]:
    """Run the trainer's part of a step: measure the mismatch where it is due, then train."""
    metrics: dict[str, float] = {}
    if is_due(step, parts.config.train.mismatch_every):
        layers = parts.engine.row_layout.moe_layers
        metrics |= probe_mismatch(parts.trainer, samples, parts.config, step, layers)
    return metrics | parts.trainer.step(samples)


async def load_newest(parts: LoopParts) -> None:
    """Give the engine the trainer's weights, and drop rows that are too old for any step to come.

    No request may be in flight.
    """
    version = parts.trainer.weight_version
    await parts.engine.load_weights(parts.trainer.publish_weights(), version)
    parts.routing.retire(before=version - parts.config.routing.max_staleness)


def is_due(step: int, every: int) -> bool:
    """Return True every ``every`` steps; never for 0."""
    return every > 0 and step % every == 0
