"""What a rule yields."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from agent_rl.config import RunConfig

Fault = tuple[str, str]  # key, what is wrong
Rule = Callable[[RunConfig], Iterator[Fault]]
