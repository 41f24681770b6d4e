"""A small stand-in that speaks SGLang's HTTP form, with faults that a real one shows when it must.

Row p is a hash of tokens 0..p and of the loaded weights, so a test can tell whose rows it got.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
import numpy as np

from agent_rl.model.config_json import ServedModel
from agent_rl.model.shape import HFNames
from routing_cache import RowLayout

LAYOUT = RowLayout(num_hidden_layers=3, moe_layers=(1, 2), num_experts=16, moe_top_k=2)
VOCAB_SIZE = 100
MODEL = ServedModel(LAYOUT, VOCAB_SIZE, "fake", False, HFNames())
Answer = dict[str, object]
# Changes an answer to /generate, gives another response, or raises.
Fault = Callable[[Answer], "Answer | httpx.Response"]


def true_rows(token_ids: np.ndarray, weights: int) -> np.ndarray:
    """Rows ``[T, hidden layers, K]``; the dense layer 0 is all zero."""
    rows = np.zeros((len(token_ids), LAYOUT.num_hidden_layers, LAYOUT.moe_top_k), np.int32)
    state = 17 + 31 * weights
    for position, token in enumerate(token_ids.tolist()):
        state = (state * 1_000_003 + token + 1) % (2**61 - 1)
        for layer in LAYOUT.moe_layers:
            pick = (state >> (7 * layer)) % 240
            first, second = divmod(pick, 15)
            rows[position, layer] = first, second + (second >= first)
    return rows


@dataclass
class FakeSGLang(httpx.AsyncBaseTransport):
    """One server. ``faults`` are used up one a generation, None meaning none."""

    info: Answer = field(default_factory=dict[str, object])
    faults: list[Fault | None] = field(default_factory=list["Fault | None"])
    latency_s: float = 0.0
    up: bool = True
    refuse_updates: bool = False
    loads_folders: bool = True  # False: it says that it did, and did not
    refuse_resume: bool = False
    ignore_pause: bool = False  # requests go on running
    keep_cache: bool = False  # a flush that does nothing
    wrong_scores: set[int] = field(
        default_factory=set[int]
    )  # number of the scoring since the start
    scored: int = 0
    weights: int = 0  # of a fresh process
    version: str = "start"
    paused: bool = False
    cached: set[bytes] = field(default_factory=set[bytes])
    running: dict[str, asyncio.Event] = field(default_factory=dict[str, asyncio.Event])
    log: list[str] = field(default_factory=list[str])
    _rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(5))

    def crash(self) -> None:
        """The process is gone: everything running fails, everything held is lost."""
        self.up = False
        for event in self.running.values():
            event.set()

    def restart(self) -> None:
        """A fresh process: with the weights that it was started with."""
        self.weights, self.version, self.paused = 0, "start", False
        self.cached.clear()
        self.up = True

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if not self.up:
            raise httpx.ConnectError("refused", request=request)
        path = request.url.path
        self.log.append(path)
        body = json.loads(request.content) if request.content else {}
        if path == "/generate":
            return await self._generate(request, body)
        answer: Answer = {"success": True, "message": "ok"}
        if path == "/server_info":
            answer = {
                "version": "fake",
                "enable_return_routed_experts": True,
                "context_length": 4096,
                "chunked_prefill_size": 512,
                "max_running_requests": 64,
                **self.info,
            }
        elif path == "/model_info":
            answer = {"model_path": "fake", "weight_version": self.version}
        elif path == "/abort_request":
            self.running.get(body["rid"], asyncio.Event()).set()
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        elif path == "/pause_generation" and not self.ignore_pause:
            self.paused = True
            for event in self.running.values():
                event.set()
        elif path == "/continue_generation" and self.refuse_resume:
            return httpx.Response(500, text="scheduler is stuck")
        elif path == "/continue_generation":
            self.paused = False
        elif path == "/update_weights_from_disk" and self.loads_folders:
            self.version = body["weight_version"]
            self.weights = int(self.version)
            self.cached.clear()
        elif path == "/update_weights_from_tensor":
            if self.refuse_updates:
                return httpx.Response(400, json={"success": False, "message": "shape mismatch"})
            if "weight_version" in body:
                self.version = body["weight_version"]
                self.weights = int(self.version)
                if not self.keep_cache:
                    self.cached.clear()
        return httpx.Response(200, json=answer)

    async def _generate(self, request: httpx.Request, body: Answer) -> httpx.Response:
        while self.paused and self.up:
            await asyncio.sleep(0.001)
        rid = str(body.get("rid", "scoring"))
        stopped = self.running.setdefault(rid, asyncio.Event())
        try:
            await asyncio.wait_for(stopped.wait(), self.latency_s or 0.001)
        except TimeoutError:
            pass
        finally:
            self.running.pop(rid, None)
        if not self.up:
            raise httpx.RemoteProtocolError("server disconnected", request=request)
        answer = self._answer(body, aborted=stopped.is_set())
        fault = self.faults.pop(0) if self.faults else None
        given = answer if fault is None else fault(answer)
        return given if isinstance(given, httpx.Response) else httpx.Response(200, json=given)

    def _answer(self, body: Answer, *, aborted: bool) -> Answer:
        prompt = np.array(body["input_ids"])
        sampling = body["sampling_params"]
        sampled = self._rng.integers(0, VOCAB_SIZE, sampling["max_new_tokens"])
        whole = np.concatenate([prompt, sampled])
        cached = max(
            (n for n in range(len(prompt) + 1) if prompt[:n].tobytes() in self.cached), default=0
        )
        self.cached |= {whole[:n].tobytes() for n in range(1, len(whole))}
        meta: Answer = {
            "id": body.get("rid", "scoring"),
            "finish_reason": {"type": "abort" if aborted else "length"},
            "prompt_tokens": len(prompt),
            "cached_tokens": min(cached, len(prompt) - 1),
            "num_retractions": 0,
            "output_token_logprobs": [
                [-1.0 - 0.01 * n, int(t), None] for n, t in enumerate(sampled)
            ],
            "weight_version": self.version,
            "weight_versions": [{"version": self.version, "start": 0, "end": len(sampled)}],
        }
        if "top_logprobs_num" in body:
            order = self._rng.permutation(VOCAB_SIZE).tolist()
            meta["output_top_logprobs"] = [[[-0.5 * t, t, None] for t in order] for _ in sampled]
        if body.get("logprob_start_len") == 0:
            value = -1.5 if self.scored in self.wrong_scores else -1.0
            meta["input_token_logprobs"] = [[None, 0, None]] + [
                [value, t, None] for t in prompt[1:].tolist()
            ]
            self.scored += 1
        if body.get("return_routed_experts"):
            rows = true_rows(whole, self.weights)[body["routed_experts_start_len"] : -1]
            meta["routed_experts"] = encode(rows)
        return {"output_ids": sampled.tolist(), "meta_info": meta}


def encode(rows: np.ndarray) -> str:
    return base64.b64encode(rows.astype("<i4").tobytes()).decode()


def decode(text: object) -> np.ndarray:
    flat = np.frombuffer(base64.b64decode(str(text)), "<i4")
    return flat.reshape(-1, LAYOUT.num_hidden_layers, LAYOUT.moe_top_k)


def change_meta(**changes: object) -> Fault:
    """An answer with other ``meta_info`` fields; a None removes the field."""

    def fault(answer: Answer) -> Answer:
        meta = {**answer["meta_info"], **changes}
        return {**answer, "meta_info": {k: v for k, v in meta.items() if v is not None}}

    return fault


def change_rows(change: Callable[[np.ndarray], np.ndarray]) -> Fault:
    def fault(answer: Answer) -> Answer:
        meta = answer["meta_info"]
        return change_meta(routed_experts=encode(change(decode(meta["routed_experts"]))))(answer)

    return fault


def page_of_a_proxy(answer: Answer) -> httpx.Response:
    return httpx.Response(200, text="<html>back in a minute</html>")


def foreign_id(answer: Answer) -> Answer:
    return {**answer, "output_ids": [*answer["output_ids"][:-1], VOCAB_SIZE]}


def hang_up(answer: Answer) -> Answer:
    raise httpx.ReadError("connection reset by peer")


def too_late(answer: Answer) -> Answer:
    raise httpx.ReadTimeout("no answer in time")
