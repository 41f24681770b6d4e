"""Back-off for requests to an engine that is overloaded or whose registry limits the rate."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from envs.sandbox.docker.docker_errors import TransientDockerError

T = TypeVar("T")


@dataclass(frozen=True)
class Backoff:
    """Exponential back-off with full jitter."""

    attempts: int = 5
    first_s: float = 0.5
    max_s: float = 30.0
    sleep: Callable[[float], None] = time.sleep
    rng: random.Random = field(default_factory=random.Random)

    def run(self, action: Callable[[], T]) -> T:
        """Return ``action``'s result; tries again while it fails with ``TransientDockerError``.

        Raises the last failure when no attempt succeeded; any other error at once.
        """
        for attempt in range(1, self.attempts):
            try:
                return action()
            except TransientDockerError:
                longest = min(self.max_s, self.first_s * 2**attempt)
                self.sleep(self.rng.uniform(longest / 2, longest))
        return action()
