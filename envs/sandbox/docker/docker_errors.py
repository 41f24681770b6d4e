"""Errors of a container engine. All of them are infrastructure, never a reward."""

from __future__ import annotations

from envs.errors import InfrastructureError


class DockerError(InfrastructureError):
    """A request that the container engine refused or failed."""


class TransientDockerError(DockerError):
    """A failure that may pass by itself: overload, rate limit, dropped connection, time-out."""


class ImageMissingError(DockerError):
    """An image that is neither here nor at its registry."""


class ContainerGoneError(DockerError):
    """A container that is gone although this process did not remove it."""


class DiskLowError(DockerError):
    """An engine's disk with less room than the floor; no new work is started."""


class ArchiveTooLargeError(DockerError):
    """A path that holds more than was asked for; code in the container may have filled it."""
