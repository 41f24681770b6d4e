"""What carries bytes in these tests instead of the network: recordings of real servers."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import json
from collections import defaultdict
from pathlib import Path

import httpx

_ID_FIELDS = ("rid", "request_id", "request_ids")
_VOLATILE = ("model_path", "weights_path")  # folders of the machine


class MissingExchangeError(Exception):
    """A replayed test asked something that was never recorded."""


def _split_ids(content: bytes) -> tuple[dict[str, object], str]:
    """The body without what differs from run to run, and its request id."""
    body = json.loads(content) if content else {}
    request_id = ""
    for field in _ID_FIELDS:
        value = body.pop(field, "")
        request_id = value[0] if isinstance(value, list) and value else (value or request_id)
    for field in _VOLATILE:
        body.pop(field, None)
    if isinstance(body.get("kwargs"), dict):
        body["kwargs"] = {k: v for k, v in body["kwargs"].items() if k not in _VOLATILE}
    if "serialized_named_tensors" in body:  # megabytes, and equal by construction
        body["serialized_named_tensors"] = len(body["serialized_named_tensors"])
    return body, request_id


def _key(request: httpx.Request) -> tuple[str, str]:
    body, request_id = _split_ids(request.content)
    text = json.dumps([request.method, request.url.raw_path.decode(), body], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24], request_id


class RecordingWire(httpx.AsyncBaseTransport):
    """Passes requests to the network and keeps the exchanges, in order of their answers."""

    def __init__(self, hide: tuple[str, ...] = ()) -> None:
        """``hide``: folders of this machine, written as ``/machine`` into the recording."""
        self._network = httpx.AsyncHTTPTransport()
        self._hide = hide
        self.exchanges: list[dict[str, object]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        key, request_id = _key(request)
        entry: dict[str, object] = {"key": key, "id": request_id, "status": 0, "body": ""}
        self.exchanges.append(entry)  # status 0: cancelled before an answer came
        response = await self._network.handle_async_request(request)
        body = await response.aread()
        kept = body
        for text in self._hide:
            kept = kept.replace(text.encode(), b"/machine")
        if request.url.path == "/server_info":
            kept = _reported_settings(kept)
        entry |= {"status": response.status_code, "body": base64.b64encode(kept).decode()}
        return httpx.Response(response.status_code, content=body)

    async def aclose(self) -> None:
        await self._network.aclose()


def _reported_settings(body: bytes) -> bytes:
    """Server settings without those that describe the machine."""
    info = json.loads(body)
    private = ("launch_command", "internal_states", "system_env", "vllm_env")
    return json.dumps({k: v for k, v in info.items() if k not in private}).encode()


class ReplayWire(httpx.AsyncBaseTransport):
    """Answers from a recording. An exchange that was cancelled then never answers now."""

    def __init__(self, exchanges: list[dict[str, str]]) -> None:
        self._answers: defaultdict[str, list[dict[str, str]]] = defaultdict(list)
        for exchange in exchanges:
            self._answers[exchange["key"]].append(exchange)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        key, request_id = _key(request)
        if not self._answers[key]:
            raise MissingExchangeError(
                f"{request.method} {request.url.path}: not in the recording, or asked more often "
                "than when it was made; run `make record-engines`"
            )
        exchange = self._answers[key].pop(0)
        if not exchange["status"]:
            await asyncio.Event().wait()
        body = base64.b64decode(exchange["body"])
        if exchange["id"]:
            body = body.replace(exchange["id"].encode(), request_id.encode())
        await asyncio.sleep(0)
        return httpx.Response(int(exchange["status"]), content=body)


def load_recording(file: Path) -> dict[str, list[dict[str, str]]]:
    """Exchanges by test case."""
    return json.loads(gzip.decompress(file.read_bytes()))["cases"]


def save_recording(file: Path, cases: dict[str, list[dict[str, object]]], about: str) -> None:
    """Write the exchanges of several cases; equal input gives equal bytes."""
    text = json.dumps({"about": about, "cases": cases}, sort_keys=True)
    file.write_bytes(gzip.compress(text.encode(), mtime=0))
