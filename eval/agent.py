"""One episode: a chat model and an environment in turn, until one of them or a limit ends it.

This is the rollout boundary: whatever goes wrong inside becomes a status, so one broken container
or endpoint never takes other episodes down, and is never counted as a wrong answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, runtime_checkable

from agent_rl.types import Status
from agent_rl.view.record import EpisodeRecord, TurnRecord
from envs.actions import Prompts
from envs.base import Env
from envs.patches.git_patch import ExtractedPatch
from eval.config import AgentLoopConfig
from eval.errors import ContextFullError, ModelError
from eval.models.base import ChatModel, ChatReply, Message
from eval.predictions import patch_text

_T = TypeVar("_T")
MakeEnv = Callable[[], Env]


@runtime_checkable
class _TellsWhatIsLeftOut(Protocol):
    def extract(self) -> ExtractedPatch: ...


async def play_episode(
    make_env: MakeEnv,
    model: ChatModel,
    prompts: Prompts,
    limits: AgentLoopConfig,
    *,
    instance_id: str,
    sample: int,
    executor: Executor,
) -> EpisodeRecord:
    """Play and record. Never raises for what happens inside: failures give status ``failed``.

    ``prompts`` are filled. Blocking calls of the environment run in ``executor``.
    """
    episode = _Episode(model, prompts, limits, instance_id, sample, executor)
    started = time.monotonic()
    try:
        await episode.run(make_env)
    except Exception as error:  # the rollout boundary: a failure is data, not a crash
        episode.fail(error)
    finally:
        await episode.release()
    return episode.record(time.monotonic() - started)


@dataclass(eq=False)
class _Episode:
    """The state of one episode in progress."""

    model: ChatModel
    prompts: Prompts
    limits: AgentLoopConfig
    instance_id: str
    sample: int
    executor: Executor
    env: Env | None = None
    turns: list[TurnRecord] = field(default_factory=list[TurnRecord])
    messages: list[Message] = field(default_factory=list[Message])
    malformed_in_a_row: int = 0
    status: Status = Status.FAILED
    stop_reason: str = "infrastructure"
    patch: str = ""
    notes: tuple[str, ...] = ()
    error: str = ""

    @property
    def key(self) -> str:
        return f"{self.instance_id}/{self.sample}"

    async def run(self, make_env: MakeEnv) -> None:
        env = self.env = await self._blocking(make_env)
        await self._blocking(env.reset)
        self.messages = [
            Message("system", self.prompts.system),
            Message("user", self.prompts.user),
        ]
        deadline = time.monotonic() + self.limits.max_seconds
        ended = ""
        while not ended:
            ended = self._limit_reached(deadline) or await self._turn(env, deadline)
        if ended == "submit" or self.limits.patch_at_limit:
            await self._take_patch(env)
        self.status = Status.COMPLETED if ended == "submit" else Status.TRUNCATED
        self.stop_reason = ended

    async def _turn(self, env: Env, deadline: float) -> str:
        """One completion and its reply; what ended the episode, empty while it goes on."""
        started = time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, deadline - started)):
                reply = await self.model.reply(self.key, self.messages)
        except ContextFullError:
            return "context_full"
        except TimeoutError as error:
            if trouble := self.model.trouble(self.key):
                raise ModelError(
                    f"no answer before the episode's time was over (agent.max_seconds="
                    f"{self.limits.max_seconds:g}): got={trouble} expected a reply"
                ) from error
            return "max_seconds"
        generated = time.monotonic()
        observation = await self._blocking(env.step, reply.text)
        seconds = (generated - started, time.monotonic() - generated)
        self._note(reply, observation.text, observation.malformed, seconds)
        if observation.done:
            return observation.stop_reason or "submit"
        self.malformed_in_a_row = self.malformed_in_a_row + 1 if observation.malformed else 0
        if self.malformed_in_a_row >= self.limits.max_malformed:
            return "malformed"
        cut = "Your last message was cut off: it was too long.\n\n" if reply.was_cut else ""
        self.messages.append(Message("assistant", reply.text))
        self.messages.append(Message("user", cut + observation.text))
        return ""

    def _limit_reached(self, deadline: float) -> str:
        if len(self.turns) >= self.limits.max_turns:
            return "max_turns"
        tokens = sum(turn.completion_tokens for turn in self.turns)
        if tokens >= self.limits.max_completion_tokens:
            return "max_completion_tokens"
        return "max_seconds" if time.monotonic() >= deadline else ""

    async def _take_patch(self, env: Env) -> None:
        if isinstance(env, _TellsWhatIsLeftOut):
            extracted = await self._blocking(env.extract)
            self.patch, self.notes = patch_text(extracted.data), extracted.notes
        else:
            self.patch = patch_text(await self._blocking(env.patch))

    def _note(
        self, reply: ChatReply, observation: str, malformed: bool, seconds: tuple[float, float]
    ) -> None:
        self.turns.append(
            TurnRecord(
                action=reply.text,
                observation=observation,
                prompt_tokens=reply.prompt_tokens,
                completion_tokens=reply.completion_tokens,
                seconds_generate=round(seconds[0], 3),
                seconds_environment=round(seconds[1], 3),
                malformed=malformed,
                reasoning=reply.reasoning,
            )
        )

    def fail(self, error: Exception) -> None:
        self.status, self.stop_reason = Status.FAILED, "infrastructure"
        self.error, self.patch = f"{type(error).__name__}: {error}", ""

    async def release(self) -> None:
        """Give back the container and the model's session; trouble here changes no verdict."""
        try:
            try:
                await self.model.end_episode(self.key)
            finally:
                if self.env is not None:
                    await self._blocking(self.env.close)
        except Exception as error:  # the rollout boundary
            self.error = self.error or f"while closing: {type(error).__name__}: {error}"

    def record(self, seconds: float) -> EpisodeRecord:
        return EpisodeRecord(
            task_id=self.instance_id,
            sample=self.sample,
            model=self.model.name,
            status=str(self.status),
            stop_reason=self.stop_reason,
            system_prompt=self.prompts.system,
            user_prompt=self.prompts.user,
            turns=tuple(self.turns),
            patch=self.patch,
            notes=self.notes,
            error=self.error,
            seconds=round(seconds, 3),
        )

    async def _blocking(self, call: Callable[..., _T], *arguments: str) -> _T:
        """In the executor; a cancelled call is waited for, since its thread still uses the env."""
        future = asyncio.get_running_loop().run_in_executor(self.executor, call, *arguments)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait({future})
            raise
