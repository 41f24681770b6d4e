"""Messages between driver and ranks. Bulk data travels beside a message, not in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agent_rl.config.schema import RunConfig
from agent_rl.protocols import Scored


@dataclass(frozen=True)
class Start:
    """Build the trainer and join the others. ``store`` is host and port of the rendezvous."""

    config: RunConfig
    model_path: Path
    rank: int
    num_ranks: int
    local_rank: int  # which of its machine's devices this rank uses
    store: tuple[str, int]


@dataclass(frozen=True)
class Step:
    """One RL step over the samples of the block beside this message."""


@dataclass(frozen=True)
class Score:
    """Score the samples of the block beside this message."""

    replay: Literal["off", "r3"]
    live_routing: bool = False


@dataclass(frozen=True)
class Publish:
    """Give the weights back as a block, from rank 0."""


@dataclass(frozen=True)
class Save:
    """Write a checkpoint below ``folder``, which every rank can reach."""

    folder: Path


@dataclass(frozen=True)
class Load:
    """Continue from the checkpoint in ``folder``, which every rank can reach."""

    folder: Path


@dataclass(frozen=True)
class Close:
    """Leave the process group and end."""


Request = Start | Step | Score | Publish | Save | Load | Close
Value = dict[str, float] | Sequence[Scored] | None


@dataclass(frozen=True)
class Done:
    """A request was carried out; ``value`` is rank 0's answer, None from the others."""

    value: Value
    weight_version: int


@dataclass(frozen=True)
class Failed:
    """A request raised ``error``; ``trace`` is where.

    ``is_ours``: raised on purpose (or by the disk), so that the rank can go on. Anything else came
    as a surprise (it crossed as the text of a ``TrainerError``) or while the weights moved, and the
    rank is not to be trusted.
    """

    error: Exception
    trace: str
    is_ours: bool


@dataclass(frozen=True)
class Alive:
    """Sign of life of a rank that is busy."""


Reply = Done | Failed
Message = Request | Reply | Alive
