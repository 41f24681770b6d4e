"""One of our engines as a chat model: token ids in and out, nothing re-tokenised."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agent_rl.errors import CapacityError, EngineError
from agent_rl.protocols import Generator
from agent_rl.rollout.chat import Renderer, closing
from agent_rl.rollout.group import member_seed
from agent_rl.types import GenerateRequest, SamplingParams, TokenIds
from eval.errors import ContextFullError, ModelError
from eval.models.base import ChatReply, Message


class EngineChat:
    """Keeps each episode's ids: the next prompt is the last one, what was sampled, and the new
    message. The renderer says how messages become ids; a system message goes before the first,
    unless the renderer has it already.

    Args:
        max_tokens: of a whole dialogue.
        temperature: 0 is greedy.
        seed: of the run; every episode draws with one of its own, the same in every run.
        renders_system: the renderer has the system prompt; a system message is then left out.
    """

    def __init__(
        self,
        generator: Generator,
        renderer: Renderer,
        *,
        name: str,
        max_tokens: int,
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        renders_system: bool = False,
    ) -> None:
        self._generator, self._renderer, self._name = generator, renderer, name
        self._max_tokens, self._max_new_tokens = max_tokens, max_new_tokens
        self._temperature, self._seed = temperature, seed
        self._renders_system = renders_system
        self._dialogues: dict[str, tuple[TokenIds, int]] = {}  # ids, messages in them

    @property
    def name(self) -> str:
        return self._name

    async def check(self) -> None:
        return None

    async def reply(self, episode: str, messages: Sequence[Message]) -> ChatReply:
        prompt = self._prompt(episode, messages)
        room = self._max_tokens - len(prompt)
        if room < 1:
            raise ContextFullError(f"{self._name}: got {len(prompt)} tokens of {self._max_tokens}")
        request = GenerateRequest(
            session_id=episode,
            token_ids=prompt,
            sampling=SamplingParams(
                temperature=self._temperature,
                max_new_tokens=min(room, self._max_new_tokens),
                stop_token_ids=self._renderer.stop_token_ids,
                seed=member_seed(self._seed, 0, episode, 0, 0),
            ),
            routed_experts_start=None,
        )
        try:
            completion = await self._generator.generate(request)
        except CapacityError as error:
            raise ContextFullError(str(error)) from error
        except EngineError as error:
            raise ModelError(str(error)) from error
        end = closing(completion.token_ids, self._renderer.stop_token_ids)
        ids = np.concatenate([prompt, completion.token_ids, end]).astype(np.int32)
        self._dialogues[episode] = (ids, len(messages) + 1)
        return ChatReply(
            self._renderer.parse(completion.token_ids),
            len(prompt),
            len(completion.token_ids),
            was_cut=completion.finish_reason != "stop",
        )

    def trouble(self, episode: str) -> str:
        return ""  # an engine that is away is waited for, then it is an error

    async def end_episode(self, episode: str) -> None:
        self._dialogues.pop(episode, None)
        await self._generator.end_session(episode)

    async def aclose(self) -> None:
        await self._generator.aclose()

    def _prompt(self, episode: str, messages: Sequence[Message]) -> TokenIds:
        known, num_known = self._dialogues.get(episode, (None, 0))
        spoken = (m for m in messages[num_known:] if m.role != "system" or not self._renders_system)
        news = "\n\n".join(message.content for message in spoken)
        if known is None:
            return self._renderer.initial(news)
        return np.concatenate([known, self._renderer.observation(news)]).astype(np.int32)
