"""Checks of samples before anything expensive starts: values, digests, versions, missing rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agent_rl.config.objective import replays_rows
from agent_rl.config.schema import RoutingConfig
from agent_rl.errors import ReplayError, TrainerError
from agent_rl.trainer.batch import fed_tokens
from agent_rl.types import TrainSample
from routing_cache import RoutingCacheError

_NAMED = 8  # samples named in an error


@dataclass(frozen=True)
class Coverage:
    """Counts of fed, trained and replayed tokens; under r2 and off nothing is missing."""

    fed: int
    fed_replayed: int
    trained: int
    trained_missing: int

    @property
    def replayed_fraction(self) -> float:
        """Share of fed tokens whose routing is replayed in the update."""
        return self.fed_replayed / max(1, self.fed)

    @property
    def missing_fraction(self) -> float:
        """Share of trained tokens that should have had a row and are routed live."""
        return self.trained_missing / max(1, self.trained)


def check_samples(
    samples: Sequence[TrainSample], config: RoutingConfig, weight_version: int
) -> Coverage:
    """Verify every digest; under r3 and mixed refuse stale rows, and missing ones: any of them
    under r3, more than ``config.max_missing_fraction`` of the trained tokens under mixed.

    Raises ``ReplayError`` naming the samples, ``TrainerError`` where an advantage or a log-prob of
    the engine's is not a number.
    """
    verify_samples(samples)
    _refuse_not_finite(samples)
    fed = trained = replayed = trained_missing = 0
    missing: list[str] = []
    for sample in samples:
        present = _present(sample) if replays_rows(config.replay) else None
        labels = np.asarray(sample.loss_mask[1:], dtype=bool)
        fed, trained = fed + len(labels), trained + int(labels.sum())
        if present is None:
            replayed += len(labels) if config.replay == "r2" else 0
            continue
        replayed += int(present.sum())
        trained_missing += int((labels & ~present).sum())
        if not present.all():
            first = int(np.flatnonzero(~present)[0])
            missing.append(f"{sample.sample_id} ({int((~present).sum())} rows, first {first})")
    coverage = Coverage(fed, replayed, trained, trained_missing)
    if replays_rows(config.replay):
        _refuse_stale(samples, config.max_staleness, weight_version)
        _refuse_missing(missing, coverage, config)
    return coverage


def _present(sample: TrainSample) -> np.ndarray:
    num_rows = fed_tokens(sample)
    if sample.routed_experts is None or not num_rows:
        return np.zeros(num_rows, dtype=bool)
    present = sample.routed_experts.gather(layers=(), start=0, stop=num_rows)[1]
    if len(present) != num_rows:
        raise ReplayError(
            f"sample {sample.sample_id}: rows do not cover the fed tokens, no weight was moved: "
            f"got={len(present)} expected={num_rows}; a row that is absent must be marked missing"
        )
    return present


def verify_samples(samples: Sequence[TrainSample]) -> None:
    """Check lengths and digests. Raises ``ReplayError`` naming every sample that fails."""
    damaged, cause = [], None
    for sample in samples:
        lengths = {
            len(sample.token_ids),
            len(sample.loss_mask),
            len(sample.rollout_logprobs),
            len(sample.advantages),
        }
        if len(lengths) != 1:
            damaged.append(f"{sample.sample_id}: arrays of different lengths {sorted(lengths)}")
        if sample.routed_experts is None:
            continue
        try:
            sample.routed_experts.verify(sample.token_ids)
        except RoutingCacheError as error:
            damaged.append(f"{sample.sample_id}: {error}")
            cause = error
    if damaged:
        raise ReplayError(
            f"{len(damaged)} samples do not belong to their rows: " + "; ".join(damaged[:_NAMED])
        ) from cause


def _refuse_not_finite(samples: Sequence[TrainSample]) -> None:
    """Refuse a log-prob that is no number: it would pass every comparison, F(2)'s included."""
    found = []
    for sample in samples:
        for name in ("rollout_logprobs", "advantages"):
            at = np.flatnonzero(sample.loss_mask & ~np.isfinite(getattr(sample, name)))
            if len(at):
                value = getattr(sample, name)[at[0]]
                found.append(f"{sample.sample_id} ({name}[{at[0]}] = {value}, {len(at)} tokens)")
    if found:
        raise TrainerError(
            f"{len(found)} samples have values that are not finite, no weight was moved: "
            f"got={', '.join(found[:_NAMED])} expected=finite at every sampled token; "
            "look at the engine's log-probs"
        )


def _refuse_stale(samples: Sequence[TrainSample], allowed: int, weight_version: int) -> None:
    stale = []
    for sample in samples:
        versions = sample.routed_experts.weight_versions if sample.routed_experts else ()
        wrong = [v for v in versions if not 0 <= weight_version - v <= allowed]
        if wrong:
            stale.append(f"{sample.sample_id} (version {', '.join(map(str, wrong))})")
    if stale:
        raise ReplayError(
            f"rows of {len(stale)} samples are of other weights than routing.max_staleness "
            f"allows: got={', '.join(stale[:_NAMED])} "
            f"expected={max(0, weight_version - allowed)} to {weight_version}"
        )


def _refuse_missing(missing: Sequence[str], coverage: Coverage, config: RoutingConfig) -> None:
    if not missing:
        return
    names = ", ".join(missing[:_NAMED]) + (" and more" if len(missing) > _NAMED else "")
    if config.replay == "r3":
        raise ReplayError(
            f"{len(missing)} samples have tokens without routing rows, no weight was moved: "
            f"got={names} expected=a row for every fed token; "
            "routing.replay=mixed trains them with the live router"
        )
    fraction = coverage.missing_fraction
    if fraction > config.max_missing_fraction:
        raise ReplayError(
            f"too many trained tokens without routing rows: got={fraction:.4f} ({names}) "
            f"expected=at most routing.max_missing_fraction={config.max_missing_fraction}"
        )
