"""Models under evaluation, as the episode loop asks them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from agent_rl.rollout.episode import Answer, Speaker
from envs.actions import Prompts
from eval.errors import ModelError


class Model(Protocol):
    """Speaks in many episodes at a time."""

    @property
    def name(self) -> str: ...

    async def check(self) -> None:
        """Find out, before anything expensive starts, that it can answer. Raises ModelError."""
        ...

    def speaker(self, episode: str, prompts: Prompts) -> Speaker:
        """Return who speaks in ``episode``, a name of its own, opening with ``prompts``."""
        ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True)
class Message:
    """One entry of a dialogue."""

    role: Literal["system", "user", "assistant"]
    content: str


class ChatModel(Protocol):
    """Answers dialogues of messages."""

    async def reply(self, episode: str, messages: Sequence[Message]) -> Answer:
        """Answer the last message. ``messages`` begin like those of the episode's last call.

        Raises ModelError for good; ContextFullError when the dialogue is too long.
        """
        ...

    def trouble(self, episode: str) -> str:
        """Return why tries to give the reply that is waited for have failed so far; nothing while
        it is only slow."""
        ...

    async def end_episode(self, episode: str) -> None:
        """Forget what is kept for an episode. Unknown ones are ignored."""
        ...


class ChatSpeaker:
    """Speaks in one episode through a chat model; keeps the dialogue."""

    def __init__(self, model: ChatModel, episode: str, prompts: Prompts) -> None:
        self._model, self._episode = model, episode
        self._messages = [Message("system", prompts.system), Message("user", prompts.user)]
        self._has_spoken = False

    async def answer(self, observed: str) -> Answer:
        if self._has_spoken:  # the first observation is the issue, which the prompts hold
            self._messages.append(Message("user", observed))
        answer = await self._model.reply(self._episode, self._messages)
        self._messages.append(Message("assistant", answer.text))
        self._has_spoken = True
        return answer

    def time_is_up(self, max_seconds: float) -> None:
        if trouble := self._model.trouble(self._episode):
            raise ModelError(
                f"no answer before the episode's time was over (agent.max_seconds="
                f"{max_seconds:g}): got={trouble} expected a reply"
            )

    async def close(self) -> None:
        await self._model.end_episode(self._episode)
