"""The distance of rollout and training on the same trajectories, one row per way of replaying.

A policy plays held-out tasks with an engine of some precision; a float32 trainer with the same
weights scores the very same tokens. What a mode means for these two passes:

    off      the trainer routes live, in the old-policy pass and in the update
    r2       the old-policy pass routes live and is replayed in the update: against the rollout it
             is ``off``; what it removes lies between the two trainer passes (``r3_update``)
    r3       the rollout's rows are replayed in both passes
    r3_tis   the same passes; the loss weights tokens by ``min(p_old / p_rollout, 2)``, so nothing
             here changes but the share of tokens that it truncates

The exact KL sums over the vocabulary at every sampled token, so it does not depend on rare samples
as k3 does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agent_rl.bench.recording import RecordingGenerator
from agent_rl.bench.router_watch import used_sets
from agent_rl.config.objective import CORRECTION_BOUNDS
from agent_rl.config.schema import EngineConfig, RunConfig
from agent_rl.metrics.mismatch import exact_kl, f_tau, flip_rate, k3, tokens_with_flip
from agent_rl.rollout.samples import branch_samples
from agent_rl.run.parts import Rollout, assemble_rollout
from agent_rl.tasks.kinds import load_tasks
from agent_rl.trainer.megatron import MegatronTrainer
from agent_rl.trainer.scores import SampleScore
from agent_rl.types import Floats, TrainSample, Trajectory
from envs.base import Task

MODES = ("off", "r2", "r3", "r3_tis")
_NUM_WATCHED = 48  # trajectories whose routing maps are compared set by set
_TIS_BOUND = CORRECTION_BOUNDS["tis"][1]


@dataclass(frozen=True)
class MismatchRow:
    """One engine precision scored one way. Shares are of sampled tokens if not said otherwise."""

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
    flip_rate: float  # (token, layer) sets that the trainer used and the rollout had not chosen
    num_sets: int  # … of this many
    live_flip_rate: float  # sets that the live router would have changed
    tokens_with_flip: float  # fed tokens that the live router would have changed in any layer
    tis_truncated: float  # tokens with p_old / p_rollout above 2; they count less under TIS


@dataclass(frozen=True)
class Measurement:
    """A row and the log-probs ``[N]`` of the sampled tokens behind it."""

    row: MismatchRow
    rollout: Floats
    train: Floats


@dataclass(frozen=True)
class Played:
    """A trajectory as a sample, and the engine's whole distribution at its sampled tokens."""

    sample: TrainSample
    full_logprobs: NDArray[np.float32]  # [N, V]
    reward: float


async def measure(
    config: RunConfig,
    policy: Path,
    *,
    engine_dtypes: Sequence[str] = ("bfloat16", "float32"),
    min_tokens: int = 10_000,
    report: Callable[[str], None] = lambda text: None,
    keep: Callable[[str, Sequence[Played]], None] = lambda dtype, played: None,
) -> list[Measurement]:
    """One measurement a mode for every engine precision, on at least ``min_tokens`` each.

    ``keep(engine_dtype, played)`` is given the trajectories of every engine.
    """
    config = replace(config, routing=replace(config.routing, replay="r3"))
    trainer = MegatronTrainer(config, policy)
    tasks = load_tasks(config.tasks).heldout
    measured: list[Measurement] = []
    try:
        for dtype in engine_dtypes:
            report(f"rolling out with a {dtype} engine")
            engine = replace(_with_dtype(config.engine, dtype), capture_routing=True)
            rollout = assemble_rollout(replace(config, engine=engine), policy)
            try:
                played = await play(rollout, tasks, min_tokens)
            finally:
                await rollout.aclose()
            report(f"scoring {sum(len(p.full_logprobs) for p in played):,} sampled tokens")
            measured += score_modes(trainer, dtype, played)
            keep(dtype, played)
    finally:
        trainer.close()
    return measured


def score_modes(
    trainer: MegatronTrainer, engine_dtype: str, played: Sequence[Played]
) -> list[Measurement]:
    """The rows of all ``MODES``; ``r2`` and ``r3_tis`` share a pass with another mode."""
    off, r3 = (_score(trainer, engine_dtype, mode, played) for mode in ("off", "r3"))
    shared = {"off": off, "r2": off, "r3": r3, "r3_tis": r3}
    return [replace(shared[mode], row=replace(shared[mode].row, replay=mode)) for mode in MODES]


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


async def play(rollout: Rollout, tasks: Sequence[Task], min_tokens: int) -> list[Played]:
    """Trajectories on ``tasks`` with at least ``min_tokens`` sampled tokens in all."""
    recorder = RecordingGenerator(rollout.engine)
    collector = rollout.collector(
        group_size=1, temperature=rollout.config.sampling.temperature, generator=recorder
    )
    played: list[Played] = []
    step = 0
    while (missing := min_tokens - sum(len(p.full_logprobs) for p in played)) > 0:
        step += 1
        wanted = len(tasks)
        if played:  # the rest needs only some of the tasks again
            per_task = (min_tokens - missing) / len(played)
            wanted = min(wanted, int(missing / per_task * 1.1) + 8)
        for group in await collector(tasks[:wanted], step):
            for trajectory in group.valid:
                played += _keep(trajectory, recorder)
        recorder.clear()
    return played


def _with_dtype(engine: EngineConfig, dtype: str) -> EngineConfig:
    match dtype:
        case "float32" | "bfloat16" | "fp8_simulated" | "int4_simulated" | "router_int4_simulated":
            return replace(engine, dtype=dtype)
        case _:
            raise ValueError(f"engine precision: got={dtype!r} expected one of EngineConfig.dtype")


def _keep(trajectory: Trajectory, recorder: RecordingGenerator) -> list[Played]:
    return [
        Played(sample, recorder.full_logprobs(sample.sample_id), trajectory.reward or 0.0)
        for sample in branch_samples(trajectory, 1.0)
    ]


def _score(
    trainer: MegatronTrainer, engine_dtype: str, mode: str, played: Sequence[Played]
) -> Measurement:
    samples = [p.sample for p in played]
    replay = "r3" if mode == "r3" else "off"
    scores = trainer.score(samples, replay, full_logits=True, live_routing=True)
    kls = [_kl(p, s) for p, s in zip(played, scores, strict=True)]
    weights = np.array([len(p.full_logprobs) for p in played], np.float64)
    masks = [s.loss_mask for s in samples]
    rollout = np.concatenate([s.rollout_logprobs[m] for s, m in zip(samples, masks, strict=True)])
    train = np.concatenate([s.logprobs[m] for s, m in zip(scores, masks, strict=True)])
    recorded, live = routing(samples, scores)
    live_flips = flip_rate(recorded, live)
    used = used_sets(trainer, samples[:_NUM_WATCHED], replay) if mode == "r3" else None
    low, high = bootstrap(np.array(kls), weights)
    row = MismatchRow(
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
        flip_rate=live_flips if used is None else used.flip_rate,
        num_sets=recorded.shape[0] * recorded.shape[1] if used is None else used.num_sets,
        live_flip_rate=live_flips,
        tokens_with_flip=tokens_with_flip(recorded, live),
        tis_truncated=float(np.mean(train - rollout > np.log(_TIS_BOUND))),
    )
    return Measurement(row, rollout, train)


def _kl(played: Played, score: SampleScore) -> float:
    assert score.full_logprobs is not None
    return exact_kl(played.full_logprobs, score.full_logprobs)


def routing(
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


def bootstrap(
    values: NDArray[np.float64], weights: NDArray[np.float64], repeats: int = 1000
) -> tuple[float, float]:
    """95 % interval of the weighted mean, resampling trajectories."""
    rng = np.random.default_rng(0)
    chosen = rng.integers(0, len(values), (repeats, len(values)))
    means = (values[chosen] * weights[chosen]).sum(1) / weights[chosen].sum(1)
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))
