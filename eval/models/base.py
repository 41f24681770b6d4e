"""What the agent loop needs from a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True)
class Message:
    """One entry of a dialogue."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True)
class ChatReply:
    """One completion. ``reasoning`` is thinking that the endpoint gives apart from the text."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    was_cut: bool = False  # by the limit on new tokens
    reasoning: str = ""


class ChatModel(Protocol):
    """Answers dialogues; many at a time."""

    @property
    def name(self) -> str: ...

    async def check(self) -> None:
        """Find out, before anything expensive starts, that it can answer. Raises ModelError."""
        ...

    async def reply(self, episode: str, messages: Sequence[Message]) -> ChatReply:
        """The next message. ``messages`` begin like those of the episode's last call.

        Raises ModelError for good; ContextFullError when the dialogue is too long.
        """
        ...

    def trouble(self, episode: str) -> str:
        """Why tries to give the reply that is waited for have failed so far; empty while it is
        only slow."""
        ...

    async def end_episode(self, episode: str) -> None:
        """Forget what is kept for an episode. Unknown ones are ignored."""
        ...

    async def aclose(self) -> None: ...
