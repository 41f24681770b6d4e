"""Samples of the trainer's tests, changed in one respect."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from agent_rl.protocols import Scored
from agent_rl.types import TrainSample
from routing_cache import ArrayRows

LENGTHS = (9, 30, 5, 17, 1, 12, 23, 2)


def with_rollout(samples: list[TrainSample], scores: Sequence[Scored]) -> list[TrainSample]:
    """The samples as if sampled by the policy that was scored."""
    return [
        dataclasses.replace(sample, rollout_logprobs=score.logprobs)
        for sample, score in zip(samples, scores, strict=True)
    ]


def without_rows(sample: TrainSample) -> TrainSample:
    return dataclasses.replace(sample, routed_experts=None)


def at_version(samples: list[TrainSample], version: int) -> list[TrainSample]:
    """The same samples, rows included, as of another weight version."""
    out = []
    for sample in samples:
        assert sample.routed_experts is not None
        rows, present = sample.routed_experts.gather()
        count = max(0, len(sample.token_ids) - 1)
        held = ArrayRows(
            sample.routed_experts.layout,  # type: ignore[attr-defined]
            sample.token_ids,
            rows[:count],
            present[:count],
            weight_version=version,
        )
        out.append(dataclasses.replace(sample, routed_experts=held, weight_versions=(version,)))
    return out
