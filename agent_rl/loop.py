"""The RL loop, on one page.

One step::

    tasks ──► collect ──► build ──► trainer.step ──► publish ──► engine.load_weights
              │  ▲                                                    │
              ▼  │ rows, log-probs                                    ▼
           sandbox, engine                             cache.retire(older versions)

Rollout and training take turns: the trainer works while no request is in flight, so one weight
version samples a whole step.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from agent_rl.config import RunConfig
from agent_rl.curriculum import Curriculum
from agent_rl.dynamic_sampling import Collector, collect_groups
from agent_rl.metrics.probe import probe_mismatch
from agent_rl.metrics.rollout import rollout_metrics
from agent_rl.protocols import Generator, Trainer
from agent_rl.samples import build_samples
from agent_rl.types import Group
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
    """Run steps ``first_step`` to ``config.train.steps``."""
    for step in range(first_step, parts.config.train.steps + 1):
        started = time.monotonic()
        groups = await collect_groups(parts.collect, parts.curriculum, parts.config, step)
        collected = time.monotonic()

        samples = build_samples(groups, parts.config)
        metrics = rollout_metrics(groups, parts.config.rollout.min_valid_members)
        if samples:  # equal rewards teach nothing: such a step leaves the weights alone
            if is_due(step, parts.config.train.mismatch_every):
                layers = parts.engine.row_layout.moe_layers
                metrics |= probe_mismatch(parts.trainer, samples, parts.config, step, layers)
            metrics |= parts.trainer.step(samples)
            version = parts.trainer.weight_version
            await parts.engine.load_weights(parts.trainer.publish_weights(), version)
            parts.routing.retire(before=version - parts.config.routing.max_staleness)

        metrics |= time_split(groups, collected - started, time.monotonic() - collected)
        if parts.evaluate is not None and is_due(step, parts.config.train.eval_every):
            metrics |= await parts.evaluate()
        stop = observer.step_done(step, groups, metrics)
        for trajectory in (t for group in groups for t in group.trajectories):
            if trajectory.routed_experts is not None:
                trajectory.routed_experts.release()
        if stop:
            return


def is_due(step: int, every: int) -> bool:
    """Whether something done ``every`` steps is due; 0 is never."""
    return every > 0 and step % every == 0


def time_split(groups: Sequence[Group], collect_s: float, train_s: float) -> dict[str, float]:
    """Wall time of a step; rollout time is shared out as its turns spent it."""
    turns = [turn for group in groups for t in group.trajectories for turn in t.turns]
    generate = sum(turn.seconds_generate for turn in turns)
    environment = sum(turn.seconds_environment for turn in turns)
    share = generate / (generate + environment) if turns and generate + environment > 0 else 1.0
    num_tokens = sum(len(t.token_ids) for group in groups for t in group.trajectories)
    return {
        "time_generate_s": collect_s * share,
        "time_environment_s": collect_s * (1 - share),
        "time_train_s": train_s,
        "time_step_s": collect_s + train_s,
        "tokens_per_s": num_tokens / max(1e-9, collect_s + train_s),
    }
