"""Mismatch measures against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from agent_rl.metrics import mismatch


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_k3_on_known_ratios() -> None:
    rollout, train = np.log([0.5, 0.25]), np.log([0.25, 0.5])
    expected = ((0.5 - 1 - math.log(0.5)) + (2 - 1 - math.log(2))) / 2
    assert mismatch.k3(rollout, train) == pytest.approx(expected)
    assert mismatch.k3(rollout, rollout) == 0.0
    assert mismatch.k3([], []) == 0.0


def test_k3_estimates_the_exact_divergence() -> None:
    rng = np.random.default_rng(0)
    p = log_softmax(rng.normal(size=(1, 12)))
    q = log_softmax(p + 0.3 * rng.normal(size=(1, 12)))
    drawn = rng.choice(12, size=200_000, p=np.exp(p[0]))
    exact = mismatch.exact_kl(p, q)
    assert exact == pytest.approx(float((np.exp(p) * (p - q)).sum()))
    assert mismatch.k3(p[0, drawn], q[0, drawn]) == pytest.approx(exact, rel=0.02)


def test_exact_divergence_ignores_impossible_tokens() -> None:
    p, q = np.array([[0.0, -np.inf]]), np.log([[0.5, 0.5]])
    assert mismatch.exact_kl(p, q) == pytest.approx(math.log(2))
    assert mismatch.exact_kl(np.zeros((0, 4)), np.zeros((0, 4))) == 0.0


def test_f_tau_counts_both_directions_strictly() -> None:
    rollout, train = np.zeros(4), np.log([2.5, 0.4, 1.2, 1.0])
    assert mismatch.f_tau(rollout, train, 2.0) == 0.5
    assert mismatch.f_tau(rollout, train, 1.1) == 0.75
    assert mismatch.f_tau(rollout, train, 5.0) == 0.0
    assert set(mismatch.f_taus(rollout, train)) == {"f_1_1", "f_1_5", "f_2", "f_5", "f_10"}


def test_what_is_not_a_number_is_beyond_every_bound() -> None:
    assert mismatch.f_tau([0.0, np.nan], [0.0, 0.0], 10.0) == 0.5


def test_flips_compare_sets() -> None:
    a = np.array([[[1, 2], [3, 4]], [[1, 2], [3, 4]]])
    b = np.array([[[2, 1], [4, 3]], [[1, 2], [3, 5]]])
    assert mismatch.flips(a, b).tolist() == [[False, False], [False, True]]
    assert mismatch.flip_rate(a, b) == 0.25
    assert mismatch.flip_rate(a, b, layers=[1]) == 0.5
    assert mismatch.tokens_with_flip(a, b) == 0.5


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"got=\(2,\) and \(3,\)"):
        mismatch.k3([0.0] * 3, [0.0] * 2)
    with pytest.raises(ValueError, match="different shapes"):
        mismatch.flips(np.zeros((2, 1, 2)), np.zeros((2, 2, 2)))


def test_absolute_gap() -> None:
    assert mismatch.abs_gap([-1.0, -2.0], [-1.5, -1.0]) == pytest.approx(0.75)
