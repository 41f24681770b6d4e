"""A step's samples computed with replay, without it, and by the trainer a second time.

With replay also where the run replays nothing, as long as the engine's rows are there: the
difference is what ``routing.replay=r3`` would be worth to it.

Measured on a few samples of every step, drawn anew each time: the same tokens with the recorded
rows and with live routers, which is what replay is worth, and twice with live routers in
micro-batches of another make-up, which is how far the trainer disagrees with itself. The second
is the floor below which no engine can come (arXiv 2510.11370, section 3, measures 0.84e-3 there).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agent_rl.config.schema import RunConfig
from agent_rl.metrics.mismatch import abs_gap, f_taus, flips, k3
from agent_rl.protocols import Scored, Trainer
from agent_rl.types import Floats, TrainSample


def probe_mismatch(
    trainer: Trainer,
    samples: Sequence[TrainSample],
    config: RunConfig,
    step: int,
    layers: Sequence[int],
) -> dict[str, float]:
    """Metrics of ``train.mismatch_samples`` of ``samples``, chosen by seed and step.

    ``layers`` are the global numbers of the model's MoE layers, for the names.
    Names end in ``_no_replay``, ``_replay`` (where there are rows) and ``_self``; under replay a
    flip is a router that would have chosen another set than it was given. Costs three forward
    passes of these samples, two without rows.
    """
    rng = np.random.default_rng([config.seed, step])
    count = min(config.train.mismatch_samples, len(samples))
    chosen = [samples[i] for i in rng.permutation(len(samples))[:count]]
    live = trainer.score(chosen, "off", live_routing=True)
    metrics = _mismatch(_rollout(chosen), _sampled(chosen, live), "_no_replay")
    metrics |= _flip_rates(chosen, live, layers, "_no_replay")
    if any(sample.routed_experts is not None for sample in chosen):
        replayed = trainer.score(chosen, "r3", live_routing=True)
        metrics |= _mismatch(_rollout(chosen), _sampled(chosen, replayed), "_replay")
        metrics |= _flip_rates(chosen, replayed, layers, "_replay")
    halves = [chosen[::2], chosen[1::2]]
    again = [_sampled(half, trainer.score(half, "off")) for half in halves if half]
    first = _sampled([*chosen[::2], *chosen[1::2]], [*live[::2], *live[1::2]])
    second = np.concatenate(again)
    gap = np.abs(first.astype(np.float64) - second)
    metrics |= _mismatch(first, second, "_self")
    return metrics | {"logprob_gap_max_self": float(gap.max(initial=0.0))}


def _mismatch(rollout: Floats, train: Floats, suffix: str) -> dict[str, float]:
    values = {"kl_k3": k3(rollout, train), "abs_logprob_gap": abs_gap(rollout, train)}
    return {f"{name}{suffix}": v for name, v in (values | f_taus(rollout, train)).items()}


def _rollout(samples: Sequence[TrainSample]) -> Floats:
    return np.concatenate([s.rollout_logprobs[s.loss_mask] for s in samples])


def _sampled(samples: Sequence[TrainSample], scores: Sequence[Scored]) -> Floats:
    pairs = zip(samples, scores, strict=True)
    return np.concatenate([score.logprobs[s.loss_mask] for s, score in pairs])


def _flip_rates(
    samples: Sequence[TrainSample], scores: Sequence[Scored], layers: Sequence[int], suffix: str
) -> dict[str, float]:
    """The routers' own sets against the recorded ones, in rows that are there."""
    differ = []
    for sample, score in zip(samples, scores, strict=True):
        if sample.routed_experts is None or score.live_experts is None:
            continue
        rows, present = sample.routed_experts.gather(stop=len(sample.token_ids) - 1)
        if present.any():
            differ.append(flips(rows[present], score.live_experts[present]))
    if not differ:
        return {}
    every = np.concatenate(differ)  # [T, L]
    rates = zip(layers, every.mean(axis=0), strict=True)
    return {
        f"router_flip_rate{suffix}": float(every.mean()),
        f"tokens_with_flip{suffix}": float(every.any(axis=1).mean()),
    } | {f"router_flip_rate{suffix}/layer_{layer}": float(rate) for layer, rate in rates}
