"""Random samples with the trainer's own routing, and rounds in which kinds of step are timed.

Replaying the trainer's own routing computes exactly what no replay computes, so that only its cost
is left. Every round times every kind of step, in another order each time: a machine that is slower
for a minute is slower for all of them, and a ratio taken inside a round is not moved by it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Literal

import numpy as np

from agent_rl.config.schema import (
    AgentConfig,
    AlgorithmConfig,
    OptimConfig,
    RoutingConfig,
    RunConfig,
    TrainerConfig,
)
from agent_rl.trainer.megatron import MegatronTrainer
from agent_rl.types import TrainSample
from routing_cache import ArrayRows

Step = Callable[[], object]
Report = Callable[[str], None]
Seconds = dict[str, list[float]]  # by name of the step, one per round


def step_config(replay: Literal["off", "r3"], longest: int, trainer: TrainerConfig) -> RunConfig:
    """Return a configuration of one update per step, whose rate leaves the routing as it is."""
    return RunConfig(
        agent=AgentConfig(max_tokens=longest),
        routing=RoutingConfig(replay=replay, max_staleness=1_000_000),
        algorithm=AlgorithmConfig(num_mini_steps=1),
        optim=OptimConfig(lr=1e-8),
        trainer=trainer,
    )


def random_samples(
    trainer: MegatronTrainer,
    vocab_size: int,
    lengths: Iterable[int],
    rng: np.random.Generator,
    trained: float = 1.0,
) -> list[TrainSample]:
    """Draw tokens, a share ``trained`` of them trained; log-probs and routing are the trainer's."""
    samples = []
    for number, length in enumerate(lengths):
        mask = rng.random(length) < trained
        mask[0] = False
        samples.append(
            TrainSample(
                sample_id=f"random-{number}",
                token_ids=rng.integers(6, vocab_size, length, dtype=np.int32),
                loss_mask=mask,
                rollout_logprobs=np.zeros(length, np.float32),
                advantages=np.where(mask, np.float32(1 - 2 * (number % 2)), np.float32(0)),
                weight_versions=(0,),
            )
        )
    layout, done = trainer.row_layout, []
    scores = trainer.score(samples, "off", live_routing=True)
    for sample, score in zip(samples, scores, strict=True):
        assert score.live_experts is not None
        rows = ArrayRows(layout, sample.token_ids, score.live_experts.astype(layout.dtype))
        done.append(replace(sample, rollout_logprobs=score.logprobs, routed_experts=rows))
    return done


def time_rounds(
    steps: Mapping[str, Step], num_rounds: int, report: Report = lambda text: None
) -> tuple[Seconds, Seconds]:
    """Return CPU and wall seconds of every step, after one round that is not counted."""
    cpu: Seconds = {name: [] for name in steps}
    wall: Seconds = {name: [] for name in steps}
    orders = itertools.cycle(itertools.permutations(steps))
    for number, order in zip(range(num_rounds + 1), orders, strict=False):
        for name in order:
            cpu_before, wall_before = time.process_time(), time.perf_counter()
            steps[name]()
            if number:
                cpu[name].append(time.process_time() - cpu_before)
                wall[name].append(time.perf_counter() - wall_before)
        if number:
            report(
                f"round {number}, CPU seconds: "
                + ", ".join(f"{name} {cpu[name][-1]:.2f}" for name in steps)
            )
    return cpu, wall
