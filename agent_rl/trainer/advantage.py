"""Advantages of a group's members from their rewards; another estimator is one more dict entry."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

# Rewards of a group [G], NaN where a member has none -> advantages [G].
AdvantageFn = Callable[[NDArray[np.float64]], NDArray[np.float32]]

_EPS = 1e-6


def normalised(rewards: NDArray[np.float64]) -> NDArray[np.float32]:
    """GRPO (arXiv 2402.03300, 4.1.2): ``(r - mean) / (std + 1e-6)``, population std.

    The paper says neither which std nor what guards it. verl, slime, SkyRL and TRL take the sample
    std, so that their advantages are ``sqrt((G - 1) / G)`` of these: 0.94 in a group of 8. They add
    1e-6 too, TRL 1e-4.

    ``rewards`` is ``[G]`` with NaN for members without a reward; these get 0 and count in neither
    mean nor std. A group whose rewards are all equal up to rounding, or that has one valid member,
    gets exactly 0: the largest and smallest are compared, because the std of equal float32 rewards
    is not 0.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    advantages = centred(rewards)
    if advantages.any():
        advantages /= rewards[np.isfinite(rewards)].std() + _EPS
    return advantages


def centred(rewards: NDArray[np.float64]) -> NDArray[np.float32]:
    """Dr. GRPO (arXiv 2503.20783, 3.2): ``r - mean``; otherwise as ``normalised``."""
    rewards = np.asarray(rewards, dtype=np.float64)
    advantages = np.zeros(rewards.shape, dtype=np.float32)
    valid = np.isfinite(rewards)
    values = rewards[valid]
    if values.size < 2:
        return advantages
    spread, scale = values.max() - values.min(), np.abs(values).max()
    if spread > 1e-6 * max(1.0, scale):
        advantages[valid] = values - values.mean()
    return advantages


ADVANTAGES: dict[str, AdvantageFn] = {"grpo": normalised, "dr_grpo": centred}
