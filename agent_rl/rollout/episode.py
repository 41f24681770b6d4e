"""One episode, in training and evaluation alike: a speaker and an environment in turn.

    make_env ─► reset ─► ┌ speaker.answer(observed) ─► env.step(text) ┐ ─► patch ─► grade ─► close
                         └───────── until submit or a limit ──────────┘

The loop knows text only. Who speaks, and what is kept of it (token ids, routing rows, a dialogue,
one branch or several), is the speaker's. This is the rollout boundary: whatever goes wrong inside
becomes a status, so that one broken sandbox, engine or endpoint takes no other episode down and
never turns into a reward.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, runtime_checkable

from agent_rl.errors import AgentRLError
from agent_rl.types import Status
from envs.base import Env, Observation, Score
from envs.errors import InfrastructureError
from envs.patches.git_patch import ExtractedPatch

_T = TypeVar("_T")
_Ending = tuple[Status, str]  # status and stop reason


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of an episode, and what becomes of one that they end."""

    max_turns: int
    max_malformed: int  # turns whose action nobody could read
    malformed_in_a_row: bool = False  # count from the last readable one on
    max_completion_tokens: int | None = None  # over all turns
    max_seconds: float | None = None  # after the reset
    # Put before the reply to an answer that was cut short; without it such an answer ends the
    # episode and is not carried out.
    cut_notice: str | None = None
    patch_at_limit: bool = False  # an episode that a limit ended hands in what it has
    grade: bool = True  # judge one that ended by itself, with 0 for the others


@dataclass(frozen=True)
class Answer:
    """One completion. Tokens are those of the completion and of its whole prompt."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cut_by: str = ""  # the limit that cut it short
    reasoning: str = ""  # thinking that an endpoint gives apart from the text


class NoRoomError(AgentRLError):
    """The dialogue fits its limit no more; ``limit`` is the episode's stop reason."""

    limit = "max_tokens"


class Speaker(Protocol):
    """Speaks in one episode, and keeps what shall be recorded of it."""

    async def answer(self, observed: str) -> Answer:
        """Answer the environment's last words: first the issue, then its reply to each action.

        Raises:
            NoRoomError: nothing more can be said; the episode ends with what it has.
            Exception: anything else is a failure of the machinery, never the model's.
        """
        ...

    def time_is_up(self, max_seconds: float) -> None:
        """Hear that :meth:`answer` was stopped because the episode's time is over.

        Raises an error when failing tries took that time, rather than a slow model.
        """
        ...

    async def close(self) -> None:
        """Give back what is held for the episode, whether or not it ever spoke."""
        ...


@dataclass(frozen=True)
class PlayedTurn:
    """One answer and the environment's reply to it."""

    answer: Answer
    observation: str
    malformed: bool
    seconds_generate: float
    seconds_environment: float


@dataclass
class Episode:
    """One attempt at a task, as it was played."""

    status: Status = Status.FAILED
    stop_reason: str = ""
    reward: float | None = None  # None when failed, aborted or not graded
    score: Score | None = None  # where it was graded
    turns: list[PlayedTurn] = field(default_factory=list[PlayedTurn])
    patch: bytes = b""
    notes: tuple[str, ...] = ()  # on what the patch leaves out
    error: str = ""
    seconds: float = 0.0

    def end(self, status: Status, stop_reason: str, reward: float | None = None) -> None:
        """Set the verdict. Mutates."""
        self.status, self.stop_reason, self.reward = status, stop_reason, reward


async def play(
    make_env: Callable[[], Env], speaker: Speaker, limits: EpisodeLimits, executor: Executor
) -> Episode:
    """Play one episode; close its environment and its speaker.

    Never raises for what happens inside: failures give status ``failed`` with ``error`` set.
    Cancelling gives ``aborted`` and is not raised again, so run it in a task of its own. Trouble
    while closing changes no verdict.

    Args:
        executor: runs the environment's blocking calls, ``make_env`` among them.
    """
    started = time.monotonic()
    game = _Game(make_env, speaker, limits, executor)
    episode = game.episode
    for part, when in ((game.run, ""), (game.release, "while closing: ")):
        try:
            await part()
        except asyncio.CancelledError:
            episode.end(Status.ABORTED, "cancelled")
        except Exception as error:  # the rollout boundary: a failure is data, not a crash
            episode.error = episode.error or f"{when}{type(error).__name__}: {error}"
            if not episode.stop_reason:
                episode.end(Status.FAILED, "infrastructure")
    episode.seconds = time.monotonic() - started
    return episode


@runtime_checkable
class _TellsWhatIsLeftOut(Protocol):
    def extract(self) -> ExtractedPatch: ...


@dataclass(eq=False)
class _Game:
    """An episode in progress."""

    make_env: Callable[[], Env]
    speaker: Speaker
    limits: EpisodeLimits
    executor: Executor
    episode: Episode = field(default_factory=Episode)
    env: Env | None = None
    observed: str = ""
    num_malformed: int = 0
    deadline: float | None = None  # by the event loop's clock

    async def run(self) -> None:
        """Play until something ends the episode, and judge it."""
        env, first = await self._blocking(self._start)
        self.observed = first.text
        if self.limits.max_seconds is not None:
            self.deadline = _now() + self.limits.max_seconds
        ending: _Ending | None = None
        while ending is None:
            ending = self._limit_reached() or await self._turn(env)
        status, stop_reason = ending
        if status is Status.COMPLETED or self.limits.patch_at_limit:
            await self._take_patch(env)
        reward = await self._grade(env, status) if self.limits.grade else None
        self.episode.end(status, stop_reason, reward)

    async def release(self) -> None:
        """Give back what the speaker holds and the sandbox, whatever happened."""
        try:
            await self.speaker.close()
        finally:
            if self.env is not None:
                await self._blocking(self.env.close)

    def _start(self) -> tuple[Env, Observation]:
        # In one call, so that an environment is known to `release` even when a cancellation comes
        # while it is made.
        env = self.env = self.make_env()
        return env, env.reset()

    def _limit_reached(self) -> _Ending | None:
        limits, turns = self.limits, self.episode.turns
        if len(turns) >= limits.max_turns:
            return Status.TRUNCATED, "max_turns"
        num_tokens = sum(turn.answer.completion_tokens for turn in turns)
        if limits.max_completion_tokens is not None and num_tokens >= limits.max_completion_tokens:
            return Status.TRUNCATED, "max_completion_tokens"
        if self.deadline is not None and _now() >= self.deadline:
            return Status.TRUNCATED, "max_seconds"
        return None

    async def _turn(self, env: Env) -> _Ending | None:
        """Play one answer and its reply; return what ended the episode."""
        started, limits = time.monotonic(), self.limits
        answer = await self._answer()
        if not isinstance(answer, Answer):
            return answer
        answered = time.monotonic()
        ends_cut = bool(answer.cut_by) and limits.cut_notice is None
        reply = Observation("") if ends_cut else await self._blocking(env.step, answer.text)
        seconds = (answered - started, time.monotonic() - answered)
        self.episode.turns.append(PlayedTurn(answer, reply.text, reply.malformed, *seconds))
        if ends_cut:
            return Status.TRUNCATED, answer.cut_by
        if reply.done:
            return Status.COMPLETED, reply.stop_reason or "submit"
        if limits.malformed_in_a_row and not reply.malformed:
            self.num_malformed = 0
        self.num_malformed += reply.malformed
        if self.num_malformed >= limits.max_malformed:
            return Status.TRUNCATED, "malformed" if limits.malformed_in_a_row else "max_malformed"
        notice = limits.cut_notice if answer.cut_by else ""
        self.observed = f"{notice}{reply.text}"
        return None

    async def _answer(self) -> Answer | _Ending:
        """Ask the speaker within what is left of the time."""
        timer = asyncio.timeout_at(self.deadline)
        try:
            async with timer:
                return await self.speaker.answer(self.observed)
        except NoRoomError as error:
            return Status.TRUNCATED, error.limit
        except TimeoutError:
            if not timer.expired() or self.limits.max_seconds is None:
                raise
            self.speaker.time_is_up(self.limits.max_seconds)
            return Status.TRUNCATED, "max_seconds"

    async def _take_patch(self, env: Env) -> None:
        if isinstance(env, _TellsWhatIsLeftOut):
            extracted = await self._blocking(env.extract)
            self.episode.patch, self.episode.notes = extracted.data, extracted.notes
        else:
            self.episode.patch = await self._blocking(env.patch)

    async def _grade(self, env: Env, status: Status) -> float:
        """Return the reward: only an episode that ended by itself is judged."""
        if status is not Status.COMPLETED:
            return 0.0
        score = self.episode.score = await self._blocking(env.grade)
        if score.reward is None:
            raise InfrastructureError(f"grading failed: {score.reason}")
        return score.reward

    async def _blocking(self, call: Callable[..., _T], *arguments: str) -> _T:
        """Run an environment call in the executor; a cancelled one is waited for, because an
        environment is used by one thread at a time."""
        future = asyncio.get_running_loop().run_in_executor(self.executor, call, *arguments)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait({future})
            raise


def _now() -> float:
    return asyncio.get_running_loop().time()
