"""One connection pool to one engine server: bounded, with retries only where they are safe.

A request that certainly never reached the server (connection refused, pool exhausted, 429, 503)
is sent again. One that may have been worked on is not: its reply is lost, and whether to ask again
is for the caller to say, who knows what the request did.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import orjson
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt

from agent_rl.errors import (
    CapacityError,
    EngineError,
    EngineReplyError,
    EngineTimeoutError,
    EngineUnavailableError,
)
from routing_cache import RoutingCacheError

_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_TOO_LATE = (httpx.ReadTimeout, httpx.WriteTimeout)
_BUSY_STATUSES = (429, 503)
_MAX_MESSAGE_CHARS = 400


@dataclass(frozen=True)
class TransportOptions:
    """Limits of one server's connection pool. Times in seconds."""

    max_connections: int = 256
    connect_timeout_s: float = 5.0
    reply_timeout_s: float = 600.0
    max_attempts: int = 4  # of a request that never reached the server
    backoff_s: float = 0.1  # doubled each attempt, with jitter
    max_reply_bytes: int = 1 << 30


@dataclass(frozen=True)
class HttpReply:
    """A reply with status 200 from ``where``."""

    body: bytes
    where: str = ""

    def json_object(self) -> dict[str, Any]:
        """Return the body. Raises EngineReplyError when it is anything but a JSON object."""
        try:
            answer = orjson.loads(self.body)
        except orjson.JSONDecodeError as error:
            answer = error
        if not isinstance(answer, dict):
            raise EngineReplyError(
                f"{self.where}: got {self.body[:80]!r}, expected a JSON object; something else "
                "than an engine answers there, or the reply was cut short"
            )
        return answer


@contextmanager
def replies_of(what: str) -> Iterator[None]:
    """Within: parts of a reply are picked. One that is of another form becomes EngineReplyError.

    ``what`` names address and expected server.
    """
    try:
        yield
    except RoutingCacheError as error:
        raise EngineReplyError(f"{what}: {error}") from error
    except (KeyError, IndexError) as error:
        raise EngineReplyError(f"{what}: got a reply without {error}") from error
    except (TypeError, ValueError, OverflowError) as error:
        raise EngineReplyError(f"{what}: got a reply that cannot be read ({error})") from error


class RefusedError(EngineError):
    """The server answered, and said no; ``status`` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple[type[RefusedError], tuple[str, int]]:
        return type(self), (str(self), self.status)


class HttpTransport:
    """JSON requests to ``base_url``.

    Args:
        base_url: e.g. ``http://127.0.0.1:30000``.
        options: limits.
        wire: what carries the bytes; None is the network. Recordings and faults plug in here.
    """

    def __init__(
        self,
        base_url: str,
        options: TransportOptions | None = None,
        wire: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.options = options or TransportOptions()
        self._wire = wire
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def get(self, path: str, *, timeout_s: float | None = None) -> HttpReply:
        """GET ``path``. Raises as :meth:`post` does."""
        return await self._send("GET", path, b"", timeout_s)

    async def post(
        self, path: str, body: Mapping[str, object] | None = None, *, timeout_s: float | None = None
    ) -> HttpReply:
        """POST ``body`` as JSON.

        Raises:
            EngineUnavailableError: the server is not there or hung up; EngineTimeoutError when it
                took too long.
            CapacityError: a 400 that speaks of the context length.
            RefusedError: any other status than 200.
        """
        content = b"" if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        return await self._send("POST", path, content, timeout_s)

    async def aclose(self) -> None:
        """Close the pool. Idempotent; a later request opens a new one."""
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():
            await client.aclose()

    def _connected(self) -> httpx.AsyncClient:
        """Return the pool of the running event loop: another loop cannot take it over."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            options = self.options
            self._client = httpx.AsyncClient(
                base_url=self.base_url,
                timeout=httpx.Timeout(options.reply_timeout_s, connect=options.connect_timeout_s),
                limits=httpx.Limits(
                    max_connections=options.max_connections,
                    max_keepalive_connections=options.max_connections,
                ),
                transport=self._wire,
                trust_env=False,  # a proxy from the environment must not sit between us and it
            )
            self._loop = loop
        return self._client

    async def _send(
        self, method: str, path: str, content: bytes, timeout_s: float | None
    ) -> HttpReply:
        attempts = AsyncRetrying(
            retry=retry_if_exception(_is_safe_to_repeat),
            stop=stop_after_attempt(self.options.max_attempts),
            wait=self._pause_s,
            reraise=True,
        )
        return await attempts(self._send_once, method, path, content, timeout_s)

    def _pause_s(self, state: RetryCallState) -> float:
        """Return the seconds before the next attempt: doubled each time, with jitter."""
        doubled = 2 ** (state.attempt_number - 1)
        return self.options.backoff_s * doubled * (0.5 + random.random())

    async def _send_once(
        self, method: str, path: str, content: bytes, timeout_s: float | None
    ) -> HttpReply:
        timeout = httpx.USE_CLIENT_DEFAULT if timeout_s is None else timeout_s
        headers = {"content-type": "application/json"} if content else {}
        try:
            response = await self._connected().request(
                method, path, content=content or None, headers=headers, timeout=timeout
            )
        except httpx.TransportError as error:
            kind = EngineTimeoutError if isinstance(error, _TOO_LATE) else EngineUnavailableError
            raise kind(
                f"{method} {self.base_url}{path}: got {type(error).__name__}: {error}; expected an "
                "answer; see whether the server is up and read its log"
            ) from error
        if response.status_code != 200:
            raise _refusal(method, f"{self.base_url}{path}", response)
        body = response.content
        if len(body) > self.options.max_reply_bytes:
            raise EngineError(
                f"{method} {self.base_url}{path}: got a reply of {len(body)} bytes, expected at "
                f"most {self.options.max_reply_bytes}; ask for fewer rows per request"
            )
        return HttpReply(body, f"{method} {self.base_url}{path}")


def _is_safe_to_repeat(error: BaseException) -> bool:
    """Tell whether the request certainly did not reach the server."""
    if isinstance(error, RefusedError):
        return error.status in _BUSY_STATUSES
    return isinstance(error.__cause__, _NEVER_SENT)


def _refusal(method: str, url: str, response: httpx.Response) -> EngineError:
    text = response.text[:_MAX_MESSAGE_CHARS].strip()
    message = f"{method} {url}: got status {response.status_code}: {text or 'no message'}"
    if response.status_code == 400 and ("context length" in text or "max_model_len" in text):
        return CapacityError(f"{message}; lower the agent's token limits or serve a longer context")
    return RefusedError(message, response.status_code)
