"""The exception tree of ``envs``; every message says what happened, what was got and expected."""


class EnvsError(Exception):
    """Root of everything this package raises on purpose."""


class TaskError(EnvsError):
    """A task cannot be used: a file is missing, a test is not in the form its runner reads."""


class TaskTimeoutError(TaskError):
    """A task's own tests ran into their time limit: so on this machine now, not for good."""


class EpisodeError(EnvsError):
    """The environment was used out of order: a step before reset or after the end."""


class PatchError(EnvsError):
    """A patch is damaged, asks for something unsupported or does not apply to the tree."""


class WorkspaceError(EnvsError):
    """A path cannot be read or written: absent, outside the work folder, or not a plain file."""


class InfrastructureError(EnvsError):
    """The machinery failed, not the agent: never a reward (a trajectory becomes ``failed``)."""


class SandboxFullError(InfrastructureError):
    """No space or no inodes left in a sandbox; for a tool, which the agent's own files fill, no
    more than a refusal."""


class SandboxUnavailableError(InfrastructureError):
    """No sandbox of the wanted kind works on this machine; the message says why for each kind."""
