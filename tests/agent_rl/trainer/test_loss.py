"""Losses against float64 references written out token by token."""

from __future__ import annotations

import math

import pytest
import torch

from agent_rl.config import AlgorithmConfig
from agent_rl.trainer.loss import LOSSES, LossInputs

CONFIG = AlgorithmConfig(clip_low=0.2, clip_high=0.28)


def inputs(num: int = 200, seed: int = 0) -> LossInputs:
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(num, generator=generator) * 5
    logprobs = (old + 0.4 * torch.randn(num, generator=generator)).requires_grad_()
    return LossInputs(logprobs, old, torch.randn(num, generator=generator))


def test_clipped_surrogate_value_and_gradient() -> None:
    given = inputs()
    out = LOSSES["grpo"].function(given, CONFIG)
    out.per_token.sum().backward()
    assert given.logprobs.grad is not None
    tokens = zip(
        given.logprobs.tolist(), given.old_logprobs.tolist(), given.advantages.tolist(), strict=True
    )
    for i, (new, old, advantage) in enumerate(tokens):
        ratio = math.exp(new - old)
        bounded = min(max(ratio, 0.8), 1.28)
        assert float(out.per_token[i].detach()) == pytest.approx(
            -min(ratio * advantage, bounded * advantage), rel=1e-5, abs=1e-6
        )
        clipped = (advantage > 0 and ratio > 1.28) or (advantage < 0 and ratio < 0.8)
        assert bool(out.clipped[i]) == clipped
        expected = 0.0 if clipped else -ratio * advantage
        assert float(given.logprobs.grad[i]) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert 0 < int(out.clipped.sum()) < len(out.clipped)


def test_warm_start_is_weighted_likelihood() -> None:
    given = inputs()
    loss = LOSSES["sft"]
    out = loss.function(given, CONFIG)
    expected = -given.advantages.double() * given.logprobs.detach().double()
    assert torch.allclose(out.per_token.detach().double(), expected, rtol=1e-6)
    assert not loss.needs_old
    assert not bool(out.clipped.any())


def test_no_tokens_is_an_empty_loss_with_a_gradient() -> None:
    given = inputs(num=0)
    for loss in LOSSES.values():
        total = loss.function(given, CONFIG).per_token.sum()
        assert float(total.detach()) == 0.0
        total.backward()
