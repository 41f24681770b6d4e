"""SGLang's HTTP dialect (0.5.23): ``/generate`` with ids in and ids out.

Two facts that are easy to get wrong: ``ignore_eos`` switches ``stop_token_ids`` off as well, and
``update_weights_from_tensor`` is refused outside of a ``begin/end_weight_update`` pair.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agent_rl.engines.http.inference_server import ServerFacts, ServerReply
from agent_rl.engines.http.transport import HttpReply, HttpTransport, RefusedError, replies_of
from agent_rl.engines.sglang.flags import find_hazards
from agent_rl.errors import EngineError, EngineReplyError
from agent_rl.model.config_json import ServedModel
from agent_rl.protocols import Weights
from agent_rl.types import FinishReason, Floats, GenerateRequest, TokenIds
from routing_cache.payloads import read_sglang

_BUCKET_BYTES = 256 << 20  # one request body of a weight update, before base64
_UPDATE_TIMEOUT_S = 1800.0
_MAX_FULL_VOCAB = 1024
_FORM = "expected SGLang 0.5.x's form"
_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class SGLangServer:
    """An SGLang server behind ``transport``.

    Args:
        model: gives the shape of the rows, since the server sends only bytes. Up to a vocabulary
            of 1,024 whole distributions can be asked for: every token is then a "top" token, which
            would be megabytes per token for a large vocabulary.
    """

    engine = "sglang"
    seeds_by_position = True

    def __init__(self, transport: HttpTransport, model: ServedModel) -> None:
        self.transport = transport
        self._layout = model.layout
        self._vocab_size = model.vocab_size
        self._num_ranks = 1

    @property
    def url(self) -> str:
        return self.transport.base_url

    @property
    def gives_full_logprobs(self) -> bool:
        return self._vocab_size <= _MAX_FULL_VOCAB

    async def facts(self) -> ServerFacts:
        info = (await self.transport.get("/server_info", timeout_s=30.0)).json_object()
        model = (await self.transport.get("/model_info", timeout_s=30.0)).json_object()
        with replies_of(f"{self.url}/server_info, {_FORM}"):
            self._num_ranks = int(info.get("tp_size") or 1)
            return ServerFacts(
                engine=self.engine,
                version=str(info.get("version", "unknown")),
                model_path=str(model.get("model_path", "")),
                context_length=_context_length(info),
                weight_version=str(model.get("weight_version", "")),
                captures_routing=bool(info.get("enable_return_routed_experts")),
                num_workers=self._num_ranks,
                hazards=tuple(find_hazards(info)),
            )

    async def generate(self, request: GenerateRequest, request_id: str) -> ServerReply:
        sampling: dict[str, object] = {
            "temperature": request.sampling.temperature,
            "max_new_tokens": request.sampling.max_new_tokens,
            "top_p": 1.0,
            "top_k": -1,
        }
        stops = request.sampling.stop_token_ids
        if stops:
            sampling["stop_token_ids"] = list(stops)
        else:
            sampling["ignore_eos"] = True
        if request.sampling.seed is not None:
            # Honoured by servers started with --enable-deterministic-inference.
            sampling["sampling_seed"] = request.sampling.seed & 0x7FFFFFFF
        body: dict[str, object] = {
            "rid": request_id,
            "input_ids": np.ascontiguousarray(request.token_ids),
            "sampling_params": sampling,
            "return_logprob": True,
        }
        if request.routed_experts_start is not None:
            body["return_routed_experts"] = True
            body["routed_experts_start_len"] = request.routed_experts_start
        if request.return_full_logprobs:
            body["top_logprobs_num"] = self._vocab_size
        return self._read(request, await self.transport.post("/generate", body))

    async def score(self, token_ids: TokenIds) -> Floats:
        body: dict[str, object] = {
            "input_ids": np.ascontiguousarray(token_ids),
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = (await self.transport.post("/generate", body)).json_object()
        meta = answer.get("meta_info") or {}
        pairs = meta.get("input_token_logprobs") or []
        if len(pairs) != len(token_ids):
            raise EngineReplyError(
                f"{self.url}: got {len(pairs)} prompt log-probs, expected {len(token_ids)}"
            )
        with replies_of(f"{self.url}/generate, {_FORM}"):
            return np.array([float(pair[0]) for pair in pairs[1:]], dtype=np.float32)

    async def abort(self, request_id: str) -> None:
        await self.transport.post("/abort_request", {"rid": request_id}, timeout_s=10.0)

    async def pause(self) -> None:
        await self.transport.post("/pause_generation", {"mode": "abort"}, timeout_s=120.0)

    async def resume(self) -> None:
        await self.transport.post("/continue_generation", {}, timeout_s=120.0)

    async def flush(self) -> None:
        await self.transport.post("/flush_cache?timeout=60", None, timeout_s=120.0)

    async def push_tensors(self, weights: Weights, version: int) -> None:
        """Send weights in request bodies of at most 256 MiB, as pickled CPU tensors.

        The cache is flushed and the version named only with the last body, so a half-finished
        update keeps the old name and is seen by whoever looks.
        """
        await self.transport.post("/begin_weight_update", {}, timeout_s=_UPDATE_TIMEOUT_S)
        try:
            buckets = list(_buckets(weights))
            for number, bucket in enumerate(buckets, 1):
                is_last = number == len(buckets)
                blob = base64.b64encode(pickle.dumps(bucket, protocol=4)).decode()
                body: dict[str, object] = {
                    "serialized_named_tensors": [blob] * self._num_ranks,
                    "flush_cache": is_last,
                }
                if is_last:
                    body["weight_version"] = str(version)
                reply = await self.transport.post(
                    "/update_weights_from_tensor", body, timeout_s=_UPDATE_TIMEOUT_S
                )
                self._check_success(reply, "/update_weights_from_tensor")
        finally:
            await self.transport.post("/end_weight_update", {}, timeout_s=_UPDATE_TIMEOUT_S)

    async def load_folder(self, folder: Path, version: int) -> None:
        body: dict[str, object] = {
            "model_path": str(folder.resolve()),
            "weight_version": str(version),
            "flush_cache": True,
        }
        reply = await self.transport.post(
            "/update_weights_from_disk", body, timeout_s=_UPDATE_TIMEOUT_S
        )
        self._check_success(reply, "/update_weights_from_disk")

    async def name_version(self, version: int) -> None:
        body: dict[str, object] = {"new_version": str(version), "abort_all_requests": False}
        await self.transport.post("/update_weight_version", body, timeout_s=60.0)

    async def aclose(self) -> None:
        await self.transport.aclose()

    def _check_success(self, reply: HttpReply, path: str) -> None:
        answer = reply.json_object()
        if answer.get("success") is not True:
            raise RefusedError(f"{self.url}{path}: got {answer.get('message')!r}", 200)

    def _read(self, request: GenerateRequest, reply: HttpReply) -> ServerReply:
        answer = reply.json_object()
        meta = answer.get("meta_info")
        if not isinstance(meta, dict):
            raise EngineReplyError(
                f"{self.url}/generate: got no meta_info, expected a single completion"
            )
        reason = meta.get("finish_reason") or {}
        pairs = meta.get("output_token_logprobs") or []
        payload = meta.get("routed_experts")
        rows = None
        with replies_of(f"{self.url}/generate, {_FORM}"):
            sampled = np.array(answer["output_ids"], dtype=np.int32)
            if payload is not None and request.routed_experts_start is not None:
                rows = read_sglang(
                    answer,
                    self._layout,
                    num_tokens=len(request.token_ids) + len(sampled),
                    requested_start=request.routed_experts_start,
                )
            return ServerReply(
                request_id=str(meta["id"]),
                token_ids=sampled,
                logprobs=np.array([float(pair[0]) for pair in pairs], dtype=np.float32),
                finish_reason=_REASONS[reason["type"]],
                num_prompt_tokens=int(meta.get("prompt_tokens", 0)),
                weight_versions=_versions(meta),
                cached_tokens=int(meta.get("cached_tokens") or 0),
                num_retractions=int(meta.get("num_retractions") or 0),
                rows=None if rows is None else rows.rows,
                rows_start=0 if rows is None else rows.start,
                num_row_bytes=0 if payload is None else len(payload),
                full_logprobs=self._full(meta) if request.return_full_logprobs else None,
            )

    def _full(self, meta: dict[str, Any]) -> Floats:
        """Return ``[N, V]`` from lists of (log-prob, id) pairs in falling order."""
        positions = meta["output_top_logprobs"]
        full = np.full((len(positions), self._vocab_size), -np.inf, dtype=np.float32)
        for row, pairs in zip(full, positions, strict=True):
            row[[pair[1] for pair in pairs]] = [pair[0] for pair in pairs]
        if not np.isfinite(full).all():
            raise EngineReplyError(
                f"{self.url}/generate: got {int(np.isfinite(full).sum())} log-probs, expected "
                f"{full.size}: all {self._vocab_size} tokens at {len(positions)} positions"
            )
        return full


def _versions(meta: dict[str, Any]) -> tuple[str, ...]:
    spans = meta.get("weight_versions")
    if isinstance(spans, list) and spans:
        return tuple(dict.fromkeys(str(span["version"]) for span in spans))
    return (str(meta["weight_version"]),) if "weight_version" in meta else ()


def _context_length(info: dict[str, Any]) -> int:
    """Return the configured limit, or the one that the KV pool imposes on a single request."""
    length = info.get("context_length")
    pool = info.get("max_total_num_tokens")
    limits = [int(value) for value in (length, pool) if isinstance(value, int) and value > 0]
    if not limits:
        raise EngineError("SGLang names no context length: got neither context_length nor a pool")
    return min(limits)


def _buckets(weights: Weights) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yield named CPU tensors in lists of about 256 MiB."""
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in weights.items():
        num_bytes = tensor.numel() * tensor.element_size()
        if bucket and size + num_bytes > _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        # A clone: pickling a view would send the whole storage behind it.
        bucket.append((name, tensor.detach().cpu().clone()))
        size += num_bytes
    yield bucket
