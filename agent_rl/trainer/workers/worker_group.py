"""Started ranks as the fleet sees them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agent_rl.config.schema import RunConfig
from agent_rl.protocols import Weights
from agent_rl.trainer.workers.messages import Reply, Request
from agent_rl.trainer.workers.sample_block import SampleBlock


@dataclass(frozen=True)
class Answered:
    """A rank's reply to the request in progress; rank 0 adds weights when asked to publish."""

    rank: int
    reply: Reply
    weights: Weights | None = None


@dataclass(frozen=True)
class SeenAlive:
    """A rank that is busy says that it lives."""

    rank: int


@dataclass(frozen=True)
class Lost:
    """A rank ended; ``why`` says how, in words."""

    rank: int
    why: str


Event = Answered | SeenAlive | Lost


class WorkerGroup(Protocol):
    """Started ranks. The first answer of each tells whether its trainer was built."""

    @property
    def num_ranks(self) -> int: ...

    def send(self, request: Request, samples: SampleBlock | None = None) -> None:
        """Have every rank carry ``request`` out; a rank that is gone shows in ``poll``."""
        ...

    def poll(self, timeout_s: float) -> list[Event]:
        """Return what happened since the last call; waits up to ``timeout_s`` for something."""
        ...

    def log_file(self, rank: int) -> Path: ...

    def kill(self) -> None:
        """End every rank now, whatever it does. Idempotent."""
        ...

    def shut_down(self, grace_s: float) -> None:
        """Have idle ranks leave by themselves, and end those that do not in time. Idempotent."""
        ...


def log_folder(config: RunConfig) -> Path:
    """Return the folder where the ranks of a run write what they print."""
    return Path(config.run_root).resolve() / config.name / "workers"
