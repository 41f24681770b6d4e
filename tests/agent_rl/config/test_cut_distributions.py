"""Sampling from a cut distribution, which the trainer does not score, is no training."""

from __future__ import annotations

import pytest

from agent_rl.config.rules import check_rules
from agent_rl.config.schema import RunConfig, SamplingConfig


@pytest.mark.parametrize(
    ("sampling", "refused"),
    [
        (SamplingConfig(), []),
        (SamplingConfig(temperature=0.5), []),  # the trainer divides its logits by it too
        (SamplingConfig(top_p=0.9), ["sampling.top_p"]),
        (SamplingConfig(top_k=5), ["sampling.top_k"]),
        (SamplingConfig(top_p=0.9, top_k=5), ["sampling.top_p", "sampling.top_k"]),
    ],
)
def test_only_the_whole_distribution_is_trained_on(
    sampling: SamplingConfig, refused: list[str]
) -> None:
    assert [key for key, _ in check_rules(RunConfig(sampling=sampling))] == refused
