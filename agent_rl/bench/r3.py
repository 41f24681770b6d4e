"""How far rollout and training are apart, with and without replay, on the same trajectories.

A policy plays held-out tasks with an engine of some precision; a float32 trainer with the same
weights scores the very same tokens with live routing and with the recorded one. The exact KL sums
over the vocabulary at every sampled token, so it does not depend on rare samples as k3 does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agent_rl.assemble import Rollout, assemble_rollout
from agent_rl.config import RunConfig
from agent_rl.engines.recording import RecordingGenerator
from agent_rl.environments import load_tasks
from agent_rl.metrics.mismatch import exact_kl, f_tau, flip_rate, k3, tokens_with_flip
from agent_rl.trainer.megatron import MegatronTrainer
from agent_rl.trainer.scores import SampleScore
from agent_rl.types import TrainSample, Trajectory
from envs.base import Task


@dataclass(frozen=True)
class MismatchRow:
    """One engine precision scored one way."""

    engine_dtype: str
    replay: str
    num_tokens: int  # sampled tokens
    kl_exact: float
    kl_low: float  # 95 % bootstrap interval over trajectories
    kl_high: float
    kl_k3: float
    f_1_1: float
    f_2: float
    max_logprob_gap: float
    flip_rate: float  # (token, layer) sets where the live router differs from the recorded set
    tokens_with_flip: float


async def measure(
    config: RunConfig,
    policy: Path,
    *,
    engine_dtypes: Sequence[str] = ("bfloat16", "float32"),
    min_tokens: int = 10_000,
    report: Callable[[str], None] = lambda text: None,
) -> list[MismatchRow]:
    """Rows for every engine precision, without and with replay, on at least ``min_tokens``."""
    config = replace(config, routing=replace(config.routing, replay="r3"))
    trainer = MegatronTrainer(config, policy)
    tasks = load_tasks(config.tasks).heldout
    rows: list[MismatchRow] = []
    try:
        for dtype in engine_dtypes:
            report(f"rolling out with a {dtype} engine")
            precision = "bfloat16" if dtype == "bfloat16" else "float32"
            engine = replace(config.engine, dtype=precision, capture_routing=True)
            rollout = assemble_rollout(replace(config, engine=engine), policy)
            try:
                played = await _play(rollout, tasks, min_tokens)
                rows += [_score(trainer, dtype, mode, played) for mode in ("off", "r3")]
            finally:
                await rollout.aclose()
    finally:
        trainer.close()
    return rows


def to_json(rows: Sequence[MismatchRow]) -> dict[str, float]:
    """Flat keys such as ``bfloat16_r3_kl_exact`` and the ratio that replay is judged by."""
    flat: dict[str, float] = {}
    for row in rows:
        for name, value in vars(row).items():
            if name not in ("engine_dtype", "replay"):
                flat[f"{row.engine_dtype}_{row.replay}_{name}"] = value
    for dtype in dict.fromkeys(row.engine_dtype for row in rows):
        off = flat[f"{dtype}_off_kl_exact"]
        flat[f"{dtype}_kl_r3_over_off"] = flat[f"{dtype}_r3_kl_exact"] / off if off else 0.0
    return flat


@dataclass(frozen=True)
class _Played:
    """A trajectory as a sample, and the engine's whole distribution at its sampled tokens."""

    sample: TrainSample
    full_logprobs: NDArray[np.float32]  # [N, V]


async def _play(rollout: Rollout, tasks: Sequence[Task], min_tokens: int) -> list[_Played]:
    recorder = RecordingGenerator(rollout.engine)
    collector = rollout.collector(
        group_size=1, temperature=rollout.config.sampling.temperature, generator=recorder
    )
    played: list[_Played] = []
    step = 0
    while sum(len(p.full_logprobs) for p in played) < min_tokens:
        step += 1
        for group in await collector(tasks, step):
            for trajectory in group.valid:
                if trajectory.loss_mask.any():
                    played.append(_keep(trajectory, recorder))
        recorder.clear()
    return played


def _keep(trajectory: Trajectory, recorder: RecordingGenerator) -> _Played:
    prefix = f"{trajectory.group_id}/{trajectory.member}"
    sample = TrainSample(
        sample_id=prefix,
        token_ids=trajectory.token_ids,
        loss_mask=trajectory.loss_mask,
        rollout_logprobs=trajectory.rollout_logprobs,
        advantages=trajectory.loss_mask.astype(np.float32),
        weight_versions=trajectory.weight_versions,
        routed_experts=trajectory.routed_experts,
    )
    return _Played(sample, recorder.full_logprobs(prefix))


def _score(
    trainer: MegatronTrainer, engine_dtype: str, mode: str, played: Sequence[_Played]
) -> MismatchRow:
    samples = [p.sample for p in played]
    scores = trainer.score(
        samples, "r3" if mode == "r3" else "off", full_logits=True, live_routing=True
    )
    kls = [_kl(p, s) for p, s in zip(played, scores, strict=True)]
    weights = np.array([len(p.full_logprobs) for p in played], np.float64)
    masks = [s.loss_mask for s in samples]
    rollout = np.concatenate([s.rollout_logprobs[m] for s, m in zip(samples, masks, strict=True)])
    train = np.concatenate([s.logprobs[m] for s, m in zip(scores, masks, strict=True)])
    recorded, live = _routing(samples, scores)
    low, high = _bootstrap(np.array(kls), weights)
    return MismatchRow(
        engine_dtype=engine_dtype,
        replay=mode,
        num_tokens=len(rollout),
        kl_exact=float(np.average(kls, weights=weights)),
        kl_low=low,
        kl_high=high,
        kl_k3=k3(rollout, train),
        f_1_1=f_tau(rollout, train, 1.1),
        f_2=f_tau(rollout, train, 2.0),
        max_logprob_gap=float(np.abs(rollout - train).max()),
        flip_rate=flip_rate(recorded, live),
        tokens_with_flip=tokens_with_flip(recorded, live),
    )


def _kl(played: _Played, score: SampleScore) -> float:
    assert score.full_logprobs is not None
    return exact_kl(played.full_logprobs, score.full_logprobs)


def _routing(
    samples: Sequence[TrainSample], scores: Sequence[SampleScore]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Recorded and live sets of every fed token, ``[T, L, K]`` each."""
    recorded, live = [], []
    for sample, score in zip(samples, scores, strict=True):
        assert sample.routed_experts is not None
        assert score.live_experts is not None
        rows, present = sample.routed_experts.gather(stop=len(sample.token_ids) - 1)
        recorded.append(rows[present].astype(np.int64))
        live.append(score.live_experts[present])
    return np.concatenate(recorded), np.concatenate(live)


def _bootstrap(
    values: NDArray[np.float64], weights: NDArray[np.float64], repeats: int = 1000
) -> tuple[float, float]:
    """95 % interval of the weighted mean, resampling trajectories."""
    rng = np.random.default_rng(0)
    chosen = rng.integers(0, len(values), (repeats, len(values)))
    means = (values[chosen] * weights[chosen]).sum(1) / weights[chosen].sum(1)
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))
