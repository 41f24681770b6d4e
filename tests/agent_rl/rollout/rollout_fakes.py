"""Environments and helpers of the rollout tests; nothing here runs code or needs a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from agent_rl.rollout.compact_tokenizer import CompactTokenizer, build_compact_tokenizer
from agent_rl.types import GenerateRequest, TokenIds
from envs.base import Observation, Score, Task

_T = TypeVar("_T")
WORDS = "fix view test replace submit ok pass fail got want line . a b c 1 2 3 4 5 bad"


def words_tokenizer() -> CompactTokenizer:
    return build_compact_tokenizer([WORDS])


def make_task(task_id: str = "t0", issue: str = "fix a") -> Task:
    return Task(
        task_id=task_id,
        issue=issue,
        files={},
        focus_path="a.py",
        visible_tests=(),
        hidden_files={},
        expected={},
        solution=b"",
    )


class ScriptedEnv:
    """Answers from a list, ends on ``submit``; exceptions in the list are raised."""

    def __init__(
        self,
        task: Task | None = None,
        replies: Sequence[str | Observation | Exception] = (),
        score: Score | Exception | None = None,
        reset_error: Exception | None = None,
    ) -> None:
        self.task = task or make_task()
        self.actions: list[str] = []
        self.num_closed = 0
        self._replies = list(replies)
        self._score = score or Score(1.0, "graded", "solved", passed=1)
        self._reset_error = reset_error

    def reset(self) -> Observation:
        if self._reset_error is not None:
            raise self._reset_error
        return Observation(self.task.issue)

    def step(self, action: str) -> Observation:
        self.actions.append(action)
        if action == "submit":
            return Observation("", done=True, stop_reason="submit")
        reply = self._replies.pop(0) if self._replies else "ok"
        if isinstance(reply, Exception):
            raise reply
        return reply if isinstance(reply, Observation) else Observation(reply)

    def grade(self) -> Score:
        if isinstance(self._score, Exception):
            raise self._score
        return self._score

    def patch(self) -> bytes:
        return b"diff"

    def close(self) -> None:
        self.num_closed += 1


def says(tokenizer: CompactTokenizer, *texts: str) -> Callable[[GenerateRequest, int], TokenIds]:
    """A script that says ``texts`` in turn, each closed with ``<end>``, the last one for ever."""

    def script(request: GenerateRequest, turn: int) -> TokenIds:
        text = texts[min(turn, len(texts) - 1)]
        return np.append(tokenizer.encode(text), tokenizer.end_id).astype(np.int32)

    return script


def run(work: Callable[[ThreadPoolExecutor], Coroutine[Any, Any, _T]], num_threads: int = 4) -> _T:
    """Run a coroutine that needs an executor, with a deadline so that a hang is a failure."""
    with ThreadPoolExecutor(num_threads) as executor:

        async def limited() -> _T:
            async with asyncio.timeout(30):
                return await work(executor)

        return asyncio.run(limited())
