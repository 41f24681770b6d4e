"""The exception tree of ``eval``; every message says what happened, what was got and expected."""

from __future__ import annotations

from agent_rl.errors import AgentRLError
from agent_rl.rollout.episode import NoRoomError


class EvalError(AgentRLError):
    """Root of everything this package raises on purpose."""


class PredictionsError(EvalError):
    """A predictions file cannot be used: damaged, ambiguous, or of another data set."""


class RunMismatchError(EvalError):
    """A run folder holds another run than the one asked for, or is in use."""


class HarnessError(EvalError):
    """The official harness cannot be run, or broke off before it graded anything."""


class TooManyFailuresError(EvalError):
    """Episode after episode failed: the machinery is broken, and going on would show nothing."""


class ModelError(EvalError):
    """The model's endpoint failed for good; an infrastructure failure, never a wrong answer."""


class ContextFullError(ModelError, NoRoomError):
    """The dialogue no longer fits the model's context; the episode ends with what it has."""

    limit = "context_full"
