"""Sampling whose result depends on (logits, seed, position) alone, never on batch neighbours.

A token at absolute position p of a request with seed s is drawn by inverting the cumulative
distribution at a uniform number that is a hash of (s, p). Replaying a request in another batch,
or after a restart, draws the same token as long as the logits agree to float noise.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), element-wise, wrapping."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def counter_uniform(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1), ``[B]``, each a hash of its (seed, position) pair."""
    stream = _mix(seeds + _GOLDEN)
    hashed = _mix(stream + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (hashed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    uniforms: NDArray[np.float64],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row and give the log-probabilities of the sampling distribution.

    Args:
        logits: ``[B, V]`` of any float dtype.
        temperatures: ``[B]`` float32; 0 is greedy, with log-probabilities at temperature 1.
        uniforms: ``[B]`` in [0, 1), one per row.

    Returns:
        Token ids ``[B]`` int64 and log-probabilities ``[B, V]`` float32.
    """
    greedy = temperatures == 0
    scale = torch.where(greedy, torch.ones_like(temperatures), temperatures)
    logprobs = torch.log_softmax(logits.float() / scale[:, None], dim=-1)
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    target = torch.from_numpy(uniforms)[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    drawn = drawn.clamp_(max=logits.shape[-1] - 1)
    return torch.where(greedy, logprobs.argmax(dim=-1), drawn), logprobs
