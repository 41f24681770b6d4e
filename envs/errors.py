"""The exception tree of ``envs``; every message says what happened, what was got and expected."""


class EnvsError(Exception):
    """Root of everything this package raises on purpose."""


class TaskError(EnvsError):
    """A task that cannot be used: a file is missing, a test is not in the form its runner reads."""


class TaskTimeoutError(TaskError):
    """A time limit that a task's own tests ran into: on this machine now, not for good."""


class EpisodeError(EnvsError):
    """Use of the environment out of order: a step before reset or after the end."""


class PatchError(EnvsError):
    """A patch that is damaged, asks for something unsupported or does not apply to the tree."""


class WorkspaceError(EnvsError):
    """An unusable path: absent, outside the work folder, or not a plain file."""


class InfrastructureError(EnvsError):
    """A failure of the machinery, not of the agent: a trajectory is ``failed``, not rewarded."""


class SandboxFullError(InfrastructureError):
    """A sandbox without space or inodes left; to a tool, whose agent filled it, only a refusal."""


class SandboxUnavailableError(InfrastructureError):
    """A machine on which no sandbox of the wanted kind works.

    The message says why for each kind.
    """
