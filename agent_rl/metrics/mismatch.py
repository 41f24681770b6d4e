"""Distance of the trainer's policy from the one that sampled, on arrays and nothing else.

``rollout`` is what the inference engine reported, ``train`` what the trainer computes for the
same tokens, under the same weights unless rollouts run ahead (``train.overlap_rollout``).
Definitions after arXiv 2510.11370, section 3.

Axis letters: N sampled tokens, V vocabulary, T fed tokens, L MoE layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

TAUS = (1.1, 1.5, 2.0, 5.0, 10.0)


def k3(rollout: ArrayLike, train: ArrayLike) -> float:
    """Estimate of KL(rollout ‖ train) from sampled tokens: mean of ``r - 1 - log r``.

    ``r = p_train / p_rollout`` on the sampled token; log-probs ``[N]``. Never negative, unbiased,
    heavy-tailed (J. Schulman, "Approximating KL divergence"): report ``exact_kl`` beside it.
    arXiv 2510.11370 has the same sum under the name KL(train ‖ rollout); of tokens that the
    rollout sampled it estimates this direction.
    """
    log_ratio = _difference(train, rollout)
    return float(np.mean(np.expm1(log_ratio) - log_ratio)) if log_ratio.size else 0.0


def exact_kl(rollout: ArrayLike, train: ArrayLike) -> float:
    """Mean over tokens of ``Σ_v p_rollout (log p_rollout - log p_train)``; log-probs ``[N, V]``."""
    p, q = _float64(rollout), _float64(train)
    if p.shape != q.shape:
        raise ValueError(f"log-probs of different shapes: got={p.shape} and {q.shape}")
    if not len(p):
        return 0.0
    mass = np.exp(p)
    # 0 · log 0 is 0, whatever the other side says there.
    terms = np.where(mass > 0, mass * (np.where(mass > 0, p, 0.0) - q), 0.0)
    return float(terms.sum(axis=-1).mean())


def f_tau(rollout: ArrayLike, train: ArrayLike, tau: float) -> float:
    """Share of tokens with ``max(p_train/p_rollout, p_rollout/p_train) > tau``, ``[N]`` each.

    A log-prob that is not a number counts as beyond every ``tau``: no alarm may sleep through it.
    """
    gap = np.abs(_difference(train, rollout))
    return float(np.mean(~(gap <= np.log(tau)))) if gap.size else 0.0


def f_taus(rollout: ArrayLike, train: ArrayLike) -> dict[str, float]:
    """``f_tau`` for the usual thresholds: keys ``f_1_1, f_1_5, f_2, f_5, f_10``."""
    return {f_tau_name(tau): f_tau(rollout, train, tau) for tau in TAUS}


def f_tau_name(tau: float) -> str:
    """``1.1 → "f_1_1"``, ``2.0 → "f_2"``."""
    return "f_" + f"{tau:g}".replace(".", "_")


def abs_gap(rollout: ArrayLike, train: ArrayLike) -> float:
    """Mean ``|log p_train - log p_rollout|`` over tokens, ``[N]`` each."""
    gap = np.abs(_difference(train, rollout))
    return float(gap.mean()) if gap.size else 0.0


def flips(rows: ArrayLike, other: ArrayLike) -> NDArray[np.bool_]:
    """Return where two routings choose another *set* of experts: ``[T, L, K]`` twice → ``[T, L]``.

    The order within K does not matter: it changes no output.
    """
    a, b = np.asarray(rows), np.asarray(other)
    if a.shape != b.shape:
        raise ValueError(f"rows of different shapes: got={a.shape} and {b.shape}")
    return (np.sort(a, axis=-1) != np.sort(b, axis=-1)).any(axis=-1)


def flip_rate(rows: ArrayLike, other: ArrayLike, layers: Sequence[int] | None = None) -> float:
    """Share of (token, layer) sets that differ, over ``layers`` of the L axis (None: all)."""
    differ = flips(rows, other)
    chosen = differ if layers is None else differ[:, list(layers)]
    return float(chosen.mean()) if chosen.size else 0.0


def tokens_with_flip(rows: ArrayLike, other: ArrayLike) -> float:
    """Share of tokens with another set in at least one layer."""
    differ = flips(rows, other)
    return float(differ.any(axis=1).mean()) if differ.size else 0.0


def _float64(values: ArrayLike) -> NDArray[np.float64]:
    return np.asarray(values, dtype=np.float64)


def _difference(train: ArrayLike, rollout: ArrayLike) -> NDArray[np.float64]:
    a, b = _float64(train), _float64(rollout)
    if a.shape != b.shape:
        raise ValueError(f"log-probs of different shapes: got={a.shape} and {b.shape}")
    return a - b
