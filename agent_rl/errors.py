"""The exception tree of ``agent_rl``; messages say what happened, what was got and expected."""


class AgentRLError(Exception):
    """Root of everything this package raises on purpose."""


class ConfigError(AgentRLError):
    """A configuration cannot be used; ``problems`` holds one line for every fault found."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[object, ...]]:
        return type(self), (self.problems,)


class EngineError(AgentRLError):
    """An inference engine failed or answered something that cannot be trusted."""


class CapacityError(EngineError):
    """A request does not fit the engine: context or session limit."""


class EngineSetupError(EngineError):
    """An engine server is not set up for what is asked of it; ``problems``: one line each."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))

    def __reduce__(self) -> tuple[type["EngineSetupError"], tuple[list[str]]]:
        return type(self), (self.problems,)


class EngineUnavailableError(EngineError):
    """An engine does not answer: down, restarting or out of reach. Another one may."""


class EngineTimeoutError(EngineUnavailableError):
    """An engine took the request and did not answer in time; it may still be working on it."""


class EngineReplyError(EngineError):
    """A reply cannot be trusted: rows, ids or weight version are not those of the request."""


class EngineAbortedError(EngineError):
    """A request was ended by the engine or by us before it was done; nothing of it is used."""


class ReplayError(AgentRLError):
    """Recorded routing cannot be replayed as asked: rows missing, damaged or of another model."""


class CheckpointError(AgentRLError):
    """A checkpoint is absent, incomplete or does not belong to this run."""


class RolloutError(AgentRLError):
    """Too many trajectories failed for the step to mean anything."""


class TrainerError(AgentRLError):
    """A training step cannot be taken: nothing to train on, or values that are not finite."""
