"""One of our engines as a model under evaluation: token ids in and out, nothing tokenised twice."""

from __future__ import annotations

from agent_rl.errors import CapacityError, EngineError
from agent_rl.protocols import Generator
from agent_rl.rollout.chat import Renderer
from agent_rl.rollout.episode import Answer, NoRoomError
from agent_rl.rollout.group import member_seed
from agent_rl.rollout.token_speaker import TokenSpeaker
from agent_rl.types import SamplingParams
from envs.actions import Prompts
from eval.errors import ContextFullError, ModelError


class EngineChat:
    """Speaks as the policy does in training. The renderer says how messages become ids; a system
    message goes before the first one, unless the renderer has it already.

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

    @property
    def name(self) -> str:
        return self._name

    async def check(self) -> None:
        return None

    def speaker(self, episode: str, prompts: Prompts) -> EngineSpeaker:
        parts = [prompts.user] if self._renders_system else [prompts.system, prompts.user]
        return EngineSpeaker(
            self._generator,
            self._renderer,
            session_id=episode,
            sampling=SamplingParams(
                temperature=self._temperature,
                max_new_tokens=self._max_new_tokens,
                seed=member_seed(self._seed, 0, episode, 0, 0),
            ),
            max_tokens=self._max_tokens,
            opening="\n\n".join(parts),
        )

    async def aclose(self) -> None:
        await self._generator.aclose()


class EngineSpeaker(TokenSpeaker):
    """A token speaker whose trouble has an evaluation's names."""

    async def answer(self, observed: str) -> Answer:
        try:
            return await super().answer(observed)
        except (NoRoomError, CapacityError) as error:
            raise ContextFullError(str(error)) from error
        except EngineError as error:
            raise ModelError(str(error)) from error
