"""Ownership of containers, written as labels when one is made; it decides who may remove it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

LABEL = "agent-rl.sandbox"
RUN_LABEL = "agent-rl.run"
OWNER_LABEL = "agent-rl.owner"
EXPIRES_LABEL = "agent-rl.expires"  # seconds since the epoch

Liveness = Literal["alive", "dead", "unknown"]


@dataclass(frozen=True)
class Owner:
    """The process that controls a container.

    A process id means something only within one boot and one pid namespace, and is reused; so all
    of it is recorded.
    """

    boot_id: str
    pid_namespace: str
    pid: int
    start_ticks: int

    @classmethod
    def current(cls) -> Owner:
        pid = os.getpid()
        return cls(_boot_id(), _pid_namespace(), pid, _start_ticks(pid) or 0)

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """Invert ``str``; None for anything else."""
        parts = text.split("/")
        if len(parts) != 4 or not (parts[2].isdigit() and parts[3].isdigit()):
            return None
        return cls(parts[0], parts[1], int(parts[2]), int(parts[3]))

    def __str__(self) -> str:
        return f"{self.boot_id}/{self.pid_namespace}/{self.pid}/{self.start_ticks}"

    def liveness(self) -> Liveness:
        """Tell whether the process still runs; unknown when it lives where this one cannot look."""
        if self.boot_id != _boot_id() or self.pid_namespace != _pid_namespace():
            return "unknown"
        return "alive" if _start_ticks(self.pid) == self.start_ticks else "dead"


def make_labels(run_id: str, owner: Owner, expires_at: float) -> dict[str, str]:
    return {
        LABEL: "1",
        RUN_LABEL: run_id,
        OWNER_LABEL: str(owner),
        EXPIRES_LABEL: f"{expires_at:.0f}",
    }


def may_remove(
    labels: Mapping[str, str], run_id: str, now: float, *, dead_owners: bool = False
) -> bool:
    """Tell whether a clean-up on behalf of ``run_id`` may remove a container with these labels.

    Yes for a container of this run whose controller is dead, and for any container past the
    lifetime that its own maker gave it. Another run's containers are left alone before that,
    unless ``dead_owners`` says that those of provably dead controllers may go as well.
    """
    if labels.get(LABEL) != "1":
        return False
    expires = labels.get(EXPIRES_LABEL, "")
    if expires.isdigit() and float(expires) < now:
        return True
    owner = Owner.parse(labels.get(OWNER_LABEL, ""))
    if owner is None or owner.liveness() != "dead":
        return False
    return dead_owners or labels.get(RUN_LABEL) == run_id


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid").removeprefix("pid:[").removesuffix("]")


def _start_ticks(pid: int) -> int | None:
    """Return the start time in clock ticks since boot; None when there is no such live process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return None if fields[0] in "ZX" else int(fields[19])
