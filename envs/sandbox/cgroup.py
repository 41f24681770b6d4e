"""A memory and process limit for a whole sandbox, where root may make control groups."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Cgroup:
    """The group's folders: one under version 2, one per controller under version 1."""

    folders: tuple[Path, ...]
    events_file: Path  # holds the ``oom_kill`` counter

    @property
    def procs_files(self) -> tuple[str, ...]:
        """Files that make a process a member when it writes its id into each."""
        return tuple(str(folder / "cgroup.procs") for folder in self.folders)

    def oom_kills(self) -> int:
        """Count the processes killed so far because the group was out of memory."""
        with contextlib.suppress(OSError):
            for line in self.events_file.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
        return 0

    def remove(self) -> None:
        """Remove the group once its members are gone (waits up to a second). Idempotent."""
        deadline = time.monotonic() + 1.0
        for folder in self.folders:
            while folder.exists():
                with contextlib.suppress(OSError):
                    folder.rmdir()
                    break
                if time.monotonic() > deadline:
                    return
                time.sleep(0.01)


def remove_groups(name: str) -> bool:
    """Remove the groups of that name; returns True when none is left (one with members stays)."""
    folders = (_ROOT / name, _ROOT / "memory" / name, _ROOT / "pids" / name)
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()
    return not any(folder.exists() for folder in folders)


def make_cgroup(name: str, memory_bytes: int, max_processes: int) -> Cgroup | None:
    """Make a group; None where this process may not."""
    try:
        if (_ROOT / "cgroup.controllers").exists():
            return _make_v2(name, memory_bytes, max_processes)
        return _make_v1(name, memory_bytes, max_processes)
    except OSError:
        return None


def _make_v1(name: str, memory_bytes: int, max_processes: int) -> Cgroup:
    memory, pids = _ROOT / "memory" / name, _ROOT / "pids" / name
    group = Cgroup((memory, pids), memory / "memory.oom_control")
    with _removed_on_error(group):
        memory.mkdir()
        pids.mkdir()
        (memory / "memory.limit_in_bytes").write_text(str(memory_bytes))
        (pids / "pids.max").write_text(str(max_processes))
    return group


def _make_v2(name: str, memory_bytes: int, max_processes: int) -> Cgroup:
    folder = _ROOT / name
    (_ROOT / "cgroup.subtree_control").write_text("+memory +pids")
    group = Cgroup((folder,), folder / "memory.events")
    with _removed_on_error(group):
        folder.mkdir()
        (folder / "memory.max").write_text(str(memory_bytes))
        (folder / "memory.swap.max").write_text("0")
        (folder / "pids.max").write_text(str(max_processes))
    return group


@contextlib.contextmanager
def _removed_on_error(group: Cgroup):
    try:
        yield
    except OSError:
        group.remove()
        raise
