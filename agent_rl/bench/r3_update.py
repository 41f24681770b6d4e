"""The gap that R2 closes: between the trainer's own two passes, which the rollout never sees.

The old-policy pass runs under the weights of the rollout; every later pass of the update runs under
weights that have moved, and its live router may choose other experts for the same token. Three
figures say what replay does about it: the distance of two passes under equal weights (0 when the
trainer is deterministic), the same with the old pass's routing replayed, and the sets that one
optimizer step changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agent_rl.bench.r3 import Played
from agent_rl.bench.router_watch import used_sets
from agent_rl.config.schema import RunConfig
from agent_rl.metrics.mismatch import exact_kl, flip_rate
from agent_rl.trainer.megatron import MegatronTrainer
from agent_rl.trainer.scores import SampleScore
from agent_rl.types import TrainSample
from routing_cache import ArrayRows, RowLayout

_NUM_WATCHED = 48  # trajectories whose routing maps are compared set by set


@dataclass(frozen=True)
class UpdateRows:
    """Old-policy pass against update pass; flip rates are of (token, layer) sets."""

    kl_train_train: float  # exact KL of two live passes under the same weights
    kl_r2_update_old: float  # exact KL of the R2 update pass to the old pass, same weights
    update_flip_rate_off: float  # live routing before and after one optimizer step
    update_flip_rate_r2: float  # the same with the old pass's sets replayed
    update_flip_rate_r3: float  # the same with the rollout's sets replayed in both


def measure_update(config: RunConfig, policy: Path, played: Sequence[Played]) -> UpdateRows:
    """Score, take one policy-gradient step on ``played``, score again."""
    algorithm = replace(config.algorithm, num_mini_steps=1)
    routing = replace(config.routing, replay="off")
    trainer = MegatronTrainer(replace(config, algorithm=algorithm, routing=routing), policy)
    samples = [p.sample for p in played]
    try:
        old = trainer.score(samples, "off", full_logits=True, live_routing=True)
        again = trainer.score(samples, "off", full_logits=True)
        own = _with_own_rows(samples, old, trainer.row_layout)
        replayed = trainer.score(own, "r3", full_logits=True)
        trainer.step(_with_advantages(played))
        new = trainer.score(samples, "off", live_routing=True)
        few = slice(0, _NUM_WATCHED)
        r2 = used_sets(trainer, own[few], "r3")
        r3 = used_sets(trainer, samples[few], "r3")
    finally:
        trainer.close()
    return UpdateRows(
        kl_train_train=_mean_kl(old, again),
        kl_r2_update_old=_mean_kl(old, replayed),
        update_flip_rate_off=flip_rate(_live(old), _live(new)),
        update_flip_rate_r2=r2.flip_rate,
        update_flip_rate_r3=r3.flip_rate,
    )


def _with_own_rows(
    samples: Sequence[TrainSample], scores: Sequence[SampleScore], layout: RowLayout
) -> list[TrainSample]:
    """The samples with the trainer's own routing as their rows: what R2 replays."""
    own = []
    for sample, score in zip(samples, scores, strict=True):
        assert score.live_experts is not None
        rows = score.live_experts.astype(layout.dtype)
        version = max(sample.weight_versions)
        array = ArrayRows(layout, sample.token_ids, rows, weight_version=version)
        own.append(replace(sample, routed_experts=array))
    return own


def _with_advantages(played: Sequence[Played]) -> list[TrainSample]:
    """Reward minus the mean of all, as the advantage of every sampled token."""
    mean = float(np.mean([p.reward for p in played]))
    return [
        replace(p.sample, advantages=p.sample.loss_mask * np.float32(p.reward - mean))
        for p in played
    ]


def _mean_kl(first: Sequence[SampleScore], second: Sequence[SampleScore]) -> float:
    return exact_kl(_full(first), _full(second))


def _full(scores: Sequence[SampleScore]) -> NDArray[np.float32]:
    return np.concatenate([s.full_logprobs for s in scores if s.full_logprobs is not None])


def _live(scores: Sequence[SampleScore]) -> NDArray[np.int64]:
    return np.concatenate([s.live_experts for s in scores if s.live_experts is not None])
