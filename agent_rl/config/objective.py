"""The keys that each policy loss sets itself, where the configuration leaves them at ``null``.

An algorithm is more than its loss: Dr. GRPO also leaves out the std and normalises by a constant,
DAPO also samples again and penalises length. ``objective`` fills in what was not set, so that
``algorithm.loss=dapo`` is all of DAPO and every part of it can still be changed alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from agent_rl.config.schema import AlgorithmConfig, RunConfig

Advantage = Literal["grpo", "dr_grpo"]
Reduction = Literal["token", "sequence", "constant"]


@dataclass(frozen=True)
class Objective:
    """The keys of ``AlgorithmConfig`` that depend on the loss, all of them set.

    ``reduction``: what a step's loss is the mean over. ``token``: all trained tokens (arXiv
    2503.14476, eq. 8); ``sequence``: trajectories, each being the mean of its tokens (arXiv
    2402.03300, eq. 3); ``constant``: trajectories, each being the sum of its tokens over the
    longest allowed length (arXiv 2503.20783, listing 1, where it is that of the sampled tokens
    alone: another constant changes nothing but the gradient's norm).
    """

    advantage: Advantage
    reduction: Reduction
    clip_low: float
    clip_high: float
    overlong_fraction: float  # of agent.max_tokens
    dynamic_sampling_rounds: int


# The token mean and the upper bound of 0.28 are DAPO's: configs/repair_tiny.yaml is tuned to them.
_GRPO = Objective("grpo", "token", 0.2, 0.28, 0.0, 0)

DEFAULTS: dict[str, Objective] = {
    "grpo": _GRPO,
    "dr_grpo": Objective("dr_grpo", "constant", 0.2, 0.2, 0.0, 0),
    "dapo": Objective("grpo", "token", 0.2, 0.28, 0.2, 2),
    # arXiv 2507.18071, 5.1: the ratio of a sequence moves far less than that of a token
    "gspo": Objective("grpo", "sequence", 3e-4, 4e-4, 0.0, 0),
    # arXiv 2506.13585, 3.1: no lower bound; the paper does not print the upper one, SkyRL has 4
    "cispo": Objective("grpo", "token", 1.0, 4.0, 0.0, 0),
    "sft": Objective("grpo", "token", 0.0, 0.0, 0.0, 0),
}

# Bounds of the rollout correction; ``trainer.losses.correction`` says where they come from.
CORRECTION_BOUNDS: dict[str, tuple[float, float]] = {
    "tis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "mis": (0.0, 2.0),
}


def objective(config: AlgorithmConfig) -> Objective:
    """Return the configured values, and the loss's own where the configuration has ``null``."""
    given = {
        "advantage": config.advantage,
        "reduction": config.loss_reduction,
        "clip_low": config.clip_low,
        "clip_high": config.clip_high,
        "overlong_fraction": config.overlong_fraction,
        "dynamic_sampling_rounds": config.dynamic_sampling_rounds,
    }
    own = DEFAULTS[config.loss]
    return replace(own, **{name: value for name, value in given.items() if value is not None})


def correction_bounds(config: AlgorithmConfig) -> tuple[float, float]:
    """Return the bounds of π_old / π_rollout under ``config.correction``, which is not ``none``."""
    low, high = CORRECTION_BOUNDS[config.correction]
    return (
        low if config.correction_low is None else config.correction_low,
        high if config.correction_high is None else config.correction_high,
    )


def replays_rows(mode: str) -> bool:
    """Return True for a replay mode that uses the rows that the rollout recorded."""
    return mode in ("r3", "mixed")


def advice(config: RunConfig) -> list[str]:
    """Return what may be a mistake and is no error, one sentence each; told before a run starts."""
    replay, algorithm = config.routing.replay, config.algorithm
    said: list[str] = []
    # Rollouts of older weights differ from the old policy for another reason too.
    if replays_rows(replay) and algorithm.correction == "tis" and not config.train.overlap_rollout:
        said.append(
            f"algorithm.correction=tis beside routing.replay={replay}: replay removes most of the "
            "mismatch that TIS corrects, and arXiv 2510.11370 measured 1.69 points less with both "
            "than with R3 alone; consider algorithm.correction=none"
        )
    return said
