"""Any OpenAI-compatible endpoint: ``POST {base_url}/chat/completions``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import httpx
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    wait_exponential,
    wait_random,
)

from agent_rl.rollout.episode import Answer
from envs.actions import Prompts
from envs.actions.observation import unicode_only
from eval.errors import ContextFullError, ModelError
from eval.models.base import ChatSpeaker, Message

_PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_TOO_LONG = re.compile(r"context.{0,20}(length|window)|maximum.{0,30}tokens|too (long|many tokens)")
_THINKING = re.compile(r"\A\s*(?:<think>)?.*?</think>\s*", re.DOTALL)
_MAX_WAIT_S = 120.0


class _PassingError(Exception):
    """Trouble worth another try; ``after_s`` is what the server asked to wait."""

    def __init__(self, text: str, after_s: float = 0.0) -> None:
        super().__init__(text)
        self.after_s = after_s


class OpenAIChat:
    """A model behind HTTP. Busy and broken answers are retried with growing waits.

    Args:
        model: its name at the endpoint.
        base_url: up to and with ``/v1``.
        api_key: empty sends none.
        keep_thinking: send ``<think>`` blocks of earlier replies again.
        wait_s: the first wait of a retry; it doubles.
    """

    def __init__(
        self,
        model: str,
        base_url: str,
        *,
        api_key: str = "",
        temperature: float = 0.0,
        top_p: float = 1.0,
        max_new_tokens: int = 8192,
        timeout_s: float = 900.0,
        max_retries: int = 8,
        keep_thinking: bool = False,
        wait_s: float = 1.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._model, self._keep_thinking = model, keep_thinking
        self._settings: dict[str, Any] = {"temperature": temperature, "max_tokens": max_new_tokens}
        if top_p < 1:
            self._settings["top_p"] = top_p
        self._max_retries, self._wait_s = max_retries, wait_s
        self._troubles: dict[str, str] = {}  # of the reply that is being waited for
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(
            base_url=base_url.rstrip("/"),
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=30.0),
            limits=httpx.Limits(max_connections=None),
            transport=transport,
        )

    @property
    def name(self) -> str:
        return self._model

    async def check(self) -> None:
        try:
            answer = await self._http.get("/models")
        except httpx.HTTPError as error:
            raise ModelError(
                f"the endpoint {self._http.base_url} cannot be reached: got={error!r}"
                " expected an OpenAI-compatible server; see model.base_url"
            ) from error
        if answer.status_code in (401, 403):
            raise ModelError(
                f"the endpoint {self._http.base_url} refuses the key: got={answer.status_code};"
                " set the environment variable that model.api_key_env names"
            )

    def speaker(self, episode: str, prompts: Prompts) -> ChatSpeaker:
        return ChatSpeaker(self, episode, prompts)

    async def reply(self, episode: str, messages: Sequence[Message]) -> Answer:
        self._troubles.pop(episode, None)
        body = {
            "model": self._model,
            "messages": [self._spoken(message) for message in messages],
            **self._settings,
        }
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_PassingError),
            stop=stop_after_attempt(self._max_retries + 1),
            wait=self._wait,
            reraise=True,
        )
        try:
            return await retrying(self._try, episode, body)
        except _PassingError as error:
            raise ModelError(
                f"{self._model} gave no answer in {self._max_retries + 1} tries: got={error}"
            ) from error

    def trouble(self, episode: str) -> str:
        return self._troubles.get(episode, "")

    async def end_episode(self, episode: str) -> None:
        self._troubles.pop(episode, None)

    async def aclose(self) -> None:
        await self._http.aclose()

    def _wait(self, state: RetryCallState) -> float:
        growing = wait_exponential(multiplier=self._wait_s, max=_MAX_WAIT_S)
        wait_s = (growing + wait_random(0, self._wait_s))(state)
        error = state.outcome.exception() if state.outcome else None
        asked = error.after_s if isinstance(error, _PassingError) else 0.0
        return min(max(wait_s, asked), _MAX_WAIT_S)

    def _spoken(self, message: Message) -> dict[str, str]:
        content = message.content
        if message.role == "assistant" and not self._keep_thinking:
            content = _THINKING.sub("", content, count=1) if "</think>" in content else content
        return {"role": message.role, "content": unicode_only(content)}

    async def _try(self, episode: str, body: Mapping[str, Any]) -> Answer:
        try:
            return await self._ask(body)
        except _PassingError as error:
            self._troubles[episode] = str(error)
            raise

    async def _ask(self, body: Mapping[str, Any]) -> Answer:
        try:
            answer = await self._http.post("/chat/completions", json=body)
        except httpx.TransportError as error:
            raise _PassingError(repr(error)) from error
        if answer.status_code in _PASSING:
            raise _PassingError(_excerpt(answer), _retry_after(answer))
        if answer.status_code != 200:
            kind = ContextFullError if _is_too_long(answer) else ModelError
            raise kind(f"{self._model} refused a request: got={_excerpt(answer)}")
        try:
            return _read(answer.json())
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise _PassingError(
                f"an answer of another form ({error!r}): {_excerpt(answer)}"
            ) from error


def _read(body: Mapping[str, Any]) -> Answer:
    choice = body["choices"][0]
    message: Mapping[str, Any] = choice["message"]
    usage: Mapping[str, Any] = body.get("usage") or {}
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    content = message.get("content") or ""
    if not isinstance(content, str) or not isinstance(reasoning, str):
        raise TypeError("content is no text")
    return Answer(
        text=content,
        prompt_tokens=int(usage.get("prompt_tokens", 0)),
        completion_tokens=int(usage.get("completion_tokens", 0)),
        cut_by="max_new_tokens" if choice.get("finish_reason") == "length" else "",
        reasoning=reasoning,
    )


def _is_too_long(answer: httpx.Response) -> bool:
    return answer.status_code in (400, 413, 422) and bool(_TOO_LONG.search(answer.text.lower()))


def _retry_after(answer: httpx.Response) -> float:
    try:
        return float(answer.headers.get("retry-after", "0"))
    except ValueError:  # a date
        return 0.0


def _excerpt(answer: httpx.Response) -> str:
    return f"{answer.status_code} {cast(str, answer.text)[:300]!r}"
