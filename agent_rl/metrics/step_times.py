"""The parts of a step's wall time."""

from __future__ import annotations

import time
from collections.abc import Sequence

from agent_rl.types import Group


class StepClock:
    """Measures a step from its making on, and what of it was spent waiting for rollouts."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._waited_s = 0.0

    def waited_since(self, started: float) -> None:
        """Count the time since ``started`` (of the monotonic clock) as waiting for a rollout."""
        self._waited_s += time.monotonic() - started

    def times(self, groups: Sequence[Group], collect_s: float) -> dict[str, float]:
        """Return :func:`time_split` of a step that ends now."""
        wall_s = time.monotonic() - self._started
        return time_split(groups, collect_s, wall_s - self._waited_s, wall_s)


def time_split(
    groups: Sequence[Group], collect_s: float, train_s: float, wall_s: float
) -> dict[str, float]:
    """Return the wall times of a step; rollout time is shared out as its turns spent it.

    Args:
        collect_s: of this step's rollout, which may have run during the step before.
        train_s: of everything else in the step.
        wall_s: of the step. What ``train_s`` leaves of it was spent waiting for a rollout.
    """
    turns = [turn for group in groups for t in group.trajectories for turn in t.turns]
    generate = sum(turn.seconds_generate for turn in turns)
    environment = sum(turn.seconds_environment for turn in turns)
    share = generate / (generate + environment) if turns and generate + environment > 0 else 1.0
    num_tokens = sum(t.num_tokens for group in groups for t in group.trajectories)
    return {
        "time_generate_s": collect_s * share,
        "time_environment_s": collect_s * (1 - share),
        "time_train_s": train_s,
        "time_wait_rollout_s": wall_s - train_s,
        "time_step_s": wall_s,
        "tokens_per_s": num_tokens / max(1e-9, wall_s),
    }
