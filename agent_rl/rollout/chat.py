"""A dialogue as token ids, append-only: model output is never turned into text and back.

    prompt      = initial(issue)
    next prompt = prompt + sampled ids + observation(reply)

A renderer only ever writes what the environment said and the role markers around it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from agent_rl.errors import ConfigError
from agent_rl.rollout.compact_tokenizer import CompactTokenizer
from agent_rl.types import TokenIds

CUT_MARK = " . . . "


class Renderer(Protocol):
    """Token ids around the model's own."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a completion; the sampled one stays in the trajectory."""
        ...

    def initial(self, observation: str) -> TokenIds:
        """Return the first prompt ``[T]``, up to where the model speaks."""
        ...

    def observation(self, text: str) -> TokenIds:
        """Return the tokens ``[T]`` that follow a completion with a stop token: the rest of its
        block, the reply, and the opening of the next completion."""
        ...

    def parse(self, completion: TokenIds) -> str:
        """Return the action text of a completion ``[N]``, its stop token left out."""
        ...


class CompactRenderer:
    """``<user> issue <end> <assistant> action <end> <obs> reply <end> <assistant> …``

    Args:
        tokenizer: the policy's word-level tokenizer.
        max_observation_tokens: longer replies keep their beginning and get a mark.
    """

    def __init__(self, tokenizer: CompactTokenizer, max_observation_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._limit = max_observation_tokens
        self._mark = tokenizer.encode(CUT_MARK)
        check_observation_limit(max_observation_tokens, len(self._mark))

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return (self._tokenizer.end_id,)

    def initial(self, observation: str) -> TokenIds:
        return self._block(self._tokenizer.user_id, self._tokenizer.encode(observation))

    def observation(self, text: str) -> TokenIds:
        ids = cut_tokens(self._tokenizer.encode(text), self._limit, self._mark, head_share=1.0)
        return self._block(self._tokenizer.obs_id, ids)

    def parse(self, completion: TokenIds) -> str:
        return self._tokenizer.decode(strip_stop(completion, self.stop_token_ids))

    def _block(self, role_id: int, content: TokenIds) -> TokenIds:
        tokenizer = self._tokenizer
        ids = [role_id, *content.tolist(), tokenizer.end_id, tokenizer.assistant_id]
        return np.array(ids, dtype=np.int32)


def check_observation_limit(limit: int, mark_length: int) -> None:
    """Raise ``ConfigError`` when cut observations would be nothing but the mark."""
    if limit <= mark_length:
        raise ConfigError(
            [f"agent.max_observation_tokens: got {limit}, expected more than {mark_length}"]
        )


def cut_tokens(ids: TokenIds, limit: int, mark: TokenIds, *, head_share: float) -> TokenIds:
    """Keep at most ``limit`` of ``ids``: the beginning, ``mark``, and the end.

    ``head_share`` of the kept tokens come from the beginning.
    """
    if len(ids) <= limit:
        return ids
    head = int((limit - len(mark)) * head_share)
    tail = limit - len(mark) - head
    return np.concatenate([ids[:head], mark, ids[len(ids) - tail :]]).astype(np.int32)


def strip_stop(completion: TokenIds, stop_token_ids: tuple[int, ...]) -> TokenIds:
    """Return ``completion`` without a stop token at its end."""
    if len(completion) and int(completion[-1]) in stop_token_ids:
        return completion[:-1]
    return completion


def closing(completion: TokenIds, stop_token_ids: tuple[int, ...]) -> TokenIds:
    """Return the tokens that end the block of a ``completion`` ``[N]``: none after a stop token,
    one of them after any other end, such as a limit or a stop that is the server's own."""
    closed = len(completion) > 0 and int(completion[-1]) in stop_token_ids
    return np.array([] if closed else stop_token_ids[:1], dtype=np.int32)
