"""Our own policy as a speaker: token ids in and out of an engine, nothing tokenised twice.

next prompt = ids so far + closing of the last answer + what was observed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from agent_rl.protocols import Generator
from agent_rl.rollout.chat import Renderer, closing
from agent_rl.rollout.episode import Answer, NoRoomError
from agent_rl.rollout.replies import check_completion
from agent_rl.rollout.row_capture import RowCapture
from agent_rl.types import Completion, GenerateRequest, SamplingParams, TokenIds


@dataclass(frozen=True)
class Sampled:
    """One completion, and where its tokens begin in the sequence."""

    start: int
    completion: Completion

    @property
    def stop(self) -> int:
        return self.start + len(self.completion.token_ids)


class TokenSpeaker:
    """Speaks in one session of an engine, and keeps the ids, completions and routing rows.

    Args:
        sampling: of every turn; positions make the draws of different turns independent.
        max_tokens: of the whole sequence, prompt included.
        rows: where routing rows go; None asks for none.
        opening: said to the model in place of the first observation, unless empty.
    """

    def __init__(
        self,
        generator: Generator,
        renderer: Renderer,
        *,
        session_id: str,
        sampling: SamplingParams,
        max_tokens: int,
        rows: RowCapture | None = None,
        opening: str = "",
    ) -> None:
        self._generator, self._renderer = generator, renderer
        self._session_id, self._max_tokens, self._rows = session_id, max_tokens, rows
        self._opening = opening
        self._sampling = replace(sampling, stop_token_ids=renderer.stop_token_ids)
        self._token_ids: TokenIds = np.zeros(0, np.int32)
        self._sampled: list[Sampled] = []

    @property
    def token_ids(self) -> TokenIds:
        """The sequence so far ``[T]``; it ends with the last sampled token."""
        return self._token_ids

    @property
    def sampled(self) -> Sequence[Sampled]:
        """Every completion, in order."""
        return self._sampled

    async def answer(self, observed: str) -> Answer:
        prompt = self._prompt(observed)
        if self._rows is not None and not self._sampled:
            self._rows.begin(prompt)
        room = self._max_tokens - len(prompt)
        if room < 1:
            raise NoRoomError(
                f"the prompt fills the limit: got {len(prompt)} of {self._max_tokens}"
            )
        max_new_tokens = self._sampling.max_new_tokens
        completion = await self._sample(prompt, min(room, max_new_tokens))
        ids = completion.token_ids
        self._token_ids = np.concatenate([prompt, ids]).astype(np.int32)
        self._sampled.append(Sampled(len(prompt), completion))
        limit = "max_tokens" if room <= max_new_tokens else "max_new_tokens"
        cut_by = "" if completion.finish_reason == "stop" else limit
        return Answer(self._renderer.parse(ids), len(prompt), len(ids), cut_by)

    def time_is_up(self, max_seconds: float) -> None:
        return None  # an engine that is away is waited for, then it is an error

    async def close(self) -> None:
        await self._generator.end_session(self._session_id)

    def _prompt(self, observed: str) -> TokenIds:
        if not self._sampled:
            return self._renderer.initial(self._opening or observed)
        end = closing(self._sampled[-1].completion.token_ids, self._renderer.stop_token_ids)
        news = self._renderer.observation(observed)
        return np.concatenate([self._token_ids, end, news]).astype(np.int32)

    async def _sample(self, prompt: TokenIds, max_new_tokens: int) -> Completion:
        """Ask for one completion, check it, and put its rows into the cache."""
        request = GenerateRequest(
            session_id=self._session_id,
            token_ids=prompt,
            sampling=replace(self._sampling, max_new_tokens=max_new_tokens),
            routed_experts_start=None if self._rows is None else self._rows.next_row,
        )
        completion = await self._generator.generate(request)
        check_completion(request, completion)
        if self._rows is not None:
            self._rows.record(prompt, completion)
        return completion
