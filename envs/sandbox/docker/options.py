"""Options of containers: limits, user, network.

Anything that would open the host is not expressible.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Root inside still needs these to install packages, change owners and kill other users' processes.
DEFAULT_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID")
_ALLOWED_CAPABILITIES = frozenset((*DEFAULT_CAPABILITIES, "FSETID", "SETFCAP"))


@dataclass(frozen=True)
class DockerOptions:
    """All that a container may be given.

    There is no way to ask for ``--privileged``, host mounts, devices or another container's
    namespaces; the host's network is refused.

    Raises:
        ValueError: a limit is not positive, or the network or a capability is refused.

    Example:
        >>> DockerOptions(user="1000:1000", memory_bytes=1 << 30).network
        'none'
    """

    workspace: str = "/testbed"
    user: str = ""  # "" is the image's own user, else "name" or "uid:gid"
    network: str = "none"  # or the name of a network made for this purpose
    memory_bytes: int = 4 << 30  # swap included
    max_processes: int = 512  # threads count
    cpus: float = 2.0
    disk_bytes: int = 8 << 30  # what the container may add to its image
    max_file_bytes: int = 4 << 30
    max_open_files: int = 4096
    shm_bytes: int = 64 << 20
    capabilities: tuple[str, ...] = DEFAULT_CAPABILITIES
    runtime: str = ""  # for example "runsc"
    platform: str = ""  # for example "linux/amd64"; "" is the engine's own
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    max_lifetime_s: float = 6 * 3600.0  # after it any run's clean-up may remove the container

    def __post_init__(self) -> None:
        _check_positive(self)
        check_network(self.network)
        refused = sorted(set(self.capabilities) - _ALLOWED_CAPABILITIES)
        if refused:
            raise ValueError(
                f"capabilities are refused: got={refused} expected some of"
                f" {sorted(_ALLOWED_CAPABILITIES)}"
            )
        if not self.workspace.startswith("/") or self.workspace.rstrip("/") == "":
            raise ValueError(
                f"workspace must be an absolute folder: got={self.workspace!r} expected=/testbed"
            )


def _check_positive(options: DockerOptions) -> None:
    for name in (
        "memory_bytes",
        "max_processes",
        "cpus",
        "disk_bytes",
        "max_file_bytes",
        "max_open_files",
        "shm_bytes",
        "max_lifetime_s",
    ):
        value = getattr(options, name)
        if value <= 0:
            raise ValueError(f"container limit {name} is not positive: got={value} expected>0")


def check_network(network: str) -> None:
    """Raise ValueError for a network that sandboxes may not have."""
    if network in ("host", "bridge", "default") or network.startswith(("container:", "ns:")):
        raise ValueError(
            f"network is refused: got={network!r} expected='none' or the name of a network made"
            " for sandboxes; the host's network, its default bridge and another container's"
            " network would let the agent reach what it must not"
        )
