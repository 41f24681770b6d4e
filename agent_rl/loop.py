"""The RL loop, on one page.

One step::

    tasks ──► collect ──► build ──► trainer.step ──► publish ──► engine.load_weights
              │  ▲                                                    │
              ▼  │ rows, log-probs                                    ▼
           sandbox, engine                             cache.retire(older versions)

Rollout and training take turns, or with ``train.overlap_rollout`` work side by side on neighbouring
steps (``rollout_ahead.py``). Weights change while no request is in flight, so one weight version
samples a whole step.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from agent_rl.config.schema import RunConfig
from agent_rl.metrics.probe import probe_mismatch
from agent_rl.metrics.rollout import rollout_metrics
from agent_rl.protocols import Generator, Trainer
from agent_rl.rollout.ahead import (
    CancelLater,
    Collected,
    RolloutAhead,
    in_thread,
    release_rows,
)
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

    Cancelled while or after the weights move, the step in progress is still recorded: steps before
    it that no checkpoint holds could not be saved otherwise.
    """
    config = parts.config

    def collect(step: int) -> Awaitable[list[Group]]:
        return collect_groups(parts.collect, parts.curriculum, config, step)

    async with RolloutAhead(collect) as rollouts:
        for step in range(first_step, config.train.steps + 1):
            started = time.monotonic()
            collected = await rollouts.take(step)
            groups, waited_s = collected.groups, time.monotonic() - started
            if config.train.overlap_rollout and step < config.train.steps:
                rollouts.begin(step + 1)

            try:
                samples = build_samples(groups, config)
                metrics = rollout_metrics(groups, config.rollout.min_valid_members)
                if samples:  # equal rewards teach nothing: such a step leaves the weights alone
                    work = partial(update, parts, samples, step)
                    metrics |= await in_thread(work) if config.train.overlap_rollout else work()
                with CancelLater() as later:  # the weights have moved, so that this step counts
                    waited_s += await rollouts.settle()  # they change between two rollouts only
                    if samples:
                        await load_newest(parts)
                metrics |= times_until_now(collected, started, waited_s)
                evaluates = is_due(step, config.train.eval_every) and not later.is_cancelled
                if parts.evaluate is not None and evaluates:
                    with later:
                        metrics |= await parts.evaluate()
                stop = observer.step_done(step, groups, metrics)
            finally:
                release_rows(groups)
            later.raise_now()
            if stop:
                return


async def load_newest(parts: LoopParts) -> None:
    """Give the engine the trainer's weights, and drop rows that are too old for any step to come.

    No request may be in flight.
    """
    version = parts.trainer.weight_version
    await parts.engine.load_weights(parts.trainer.publish_weights(), version)
    parts.routing.retire(before=version - parts.config.routing.max_staleness)


def update(parts: LoopParts, samples: Sequence[TrainSample], step: int) -> dict[str, float]:
    """The trainer's part of a step: measure the mismatch where it is due, then train."""
    metrics: dict[str, float] = {}
    if is_due(step, parts.config.train.mismatch_every):
        layers = parts.engine.row_layout.moe_layers
        metrics |= probe_mismatch(parts.trainer, samples, parts.config, step, layers)
    return metrics | parts.trainer.step(samples)


def is_due(step: int, every: int) -> bool:
    """Whether something done ``every`` steps is due; 0 is never."""
    return every > 0 and step % every == 0


def times_until_now(collected: Collected, started: float, waited_s: float) -> dict[str, float]:
    """:func:`time_split` of a step that ``started`` (by the monotonic clock) and ends now.

    Args:
        waited_s: of it, for rollouts.
    """
    wall_s = time.monotonic() - started
    return time_split(collected.groups, collected.seconds, wall_s - waited_s, wall_s)


def time_split(
    groups: Sequence[Group], collect_s: float, train_s: float, wall_s: float
) -> dict[str, float]:
    """Wall time of a step; rollout time is shared out as its turns spent it.

    Args:
        collect_s: of this step's rollout, which may have run during the step before.
        train_s: of everything else in the step.
        wall_s: of the step. What ``train_s`` leaves of it was spent waiting for a rollout.
    """
    turns = [turn for group in groups for t in group.trajectories for turn in t.turns]
    generate = sum(turn.seconds_generate for turn in turns)
    environment = sum(turn.seconds_environment for turn in turns)
    share = generate / (generate + environment) if turns and generate + environment > 0 else 1.0
    num_tokens = sum(len(t.token_ids) for group in groups for t in group.trajectories)
    return {
        "time_generate_s": collect_s * share,
        "time_environment_s": collect_s * (1 - share),
        "time_train_s": train_s,
        "time_wait_rollout_s": wall_s - train_s,
        "time_step_s": wall_s,
        "tokens_per_s": num_tokens / max(1e-9, wall_s),
    }
