"""Limits of what runs in a sandbox, as the host states them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SandboxLimits:
    """Per-process limits, except where said otherwise; every number must be positive."""

    memory_bytes: int = 256 << 20  # address space
    max_processes: int = 32  # of the whole sandbox
    max_file_bytes: int = 16 << 20
    cpu_s: int = 10
    tmp_bytes: int = 64 << 20  # of the whole sandbox: everything it can write, held in memory
    tmp_inodes: int = 20_000

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"sandbox limit {name} is not positive: got={value} expected>0")
