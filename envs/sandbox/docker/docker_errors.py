"""What can go wrong with a container engine. Everything here is infrastructure, never a reward."""

from __future__ import annotations

from envs.errors import InfrastructureError


class DockerError(InfrastructureError):
    """The container engine refused or failed a request."""


class TransientDockerError(DockerError):
    """A failure that may pass by itself: overload, rate limit, dropped connection, time-out."""


class ImageMissingError(DockerError):
    """An image is neither here nor at its registry."""


class ContainerGoneError(DockerError):
    """A container that this process did not remove does not exist any more."""


class DiskLowError(DockerError):
    """The engine's disk has less room than the floor; no new work is started."""


class ArchiveTooLargeError(DockerError):
    """A path holds more than was asked for; code in the container may have filled it."""
