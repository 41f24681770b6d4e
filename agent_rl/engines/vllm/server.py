"""vLLM's HTTP dialect (0.30): ``/inference/v1/generate`` of ``vllm serve --tokens-only``.

The control endpoints exist only with ``VLLM_SERVER_DEV_MODE=1``. Replies do not name the weight
version, so the engine's own book-keeping stands in for it. Log-probs are those of the sampling
distribution only with ``--logprobs-mode processed_logprobs``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from agent_rl.engines.http.inference_server import ServerFacts, ServerReply
from agent_rl.engines.http.transport import HttpReply, HttpTransport, replies_of
from agent_rl.engines.vllm.flags import find_hazards
from agent_rl.errors import EngineError, EngineReplyError
from agent_rl.model.config_json import ServedModel
from agent_rl.protocols import Weights
from agent_rl.types import FinishReason, Floats, GenerateRequest, TokenIds
from routing_cache.payloads import read_vllm

_UPDATE_TIMEOUT_S = 1800.0
_GENERATE, _FORM = "/inference/v1/generate", "expected vLLM 0.30's form"
_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
_ID_PREFIX = "generate-tokens-"  # put before our request id by the server


class VLLMServer:
    """A vLLM server behind ``transport``. Weights come from folders only.

    Args:
        model: gives the shape of the rows.
    """

    engine = "vllm"
    gives_full_logprobs = False
    seeds_by_position = False

    def __init__(self, transport: HttpTransport, model: ServedModel) -> None:
        self.transport = transport
        self._layout = model.layout

    @property
    def url(self) -> str:
        return self.transport.base_url

    async def facts(self) -> ServerFacts:
        path = "/server_info?config_format=json"
        info = (await self.transport.get(path, timeout_s=30.0)).json_object()
        version = (await self.transport.get("/version", timeout_s=30.0)).json_object()
        weights = (await self.transport.get("/weight_info", timeout_s=30.0)).json_object()
        with replies_of(f"{self.url}{path}, {_FORM} with VLLM_SERVER_DEV_MODE=1"):
            config = info["vllm_config"]
            model, parallel = config["model_config"], config["parallel_config"]
            return ServerFacts(
                engine=self.engine,
                version=str(version.get("version", "unknown")),
                model_path=str(model["model"]),
                context_length=int(model["max_model_len"]),
                weight_version=str(weights.get("weight_version", "")),
                captures_routing=bool(model.get("enable_return_routed_experts")),
                num_workers=int(parallel["tensor_parallel_size"]),
                hazards=tuple(find_hazards(config)),
            )

    async def generate(self, request: GenerateRequest, request_id: str) -> ServerReply:
        sampling: dict[str, object] = {
            "temperature": request.sampling.temperature,
            "max_tokens": request.sampling.max_new_tokens,
            "top_p": 1.0,
            "top_k": 0,
            "logprobs": 0,  # of the sampled token alone
            "ignore_eos": True,  # stop_token_ids stay in force
            "stop_token_ids": list(request.sampling.stop_token_ids),
            "detokenize": False,
        }
        if request.sampling.seed is not None:
            sampling["seed"] = request.sampling.seed & 0x7FFFFFFF
        if request.routed_experts_start is not None:
            sampling["routed_experts_prompt_start"] = request.routed_experts_start
        body: dict[str, object] = {
            "request_id": request_id,
            "token_ids": np.ascontiguousarray(request.token_ids),
            "sampling_params": sampling,
        }
        return self._read(request, await self.transport.post(_GENERATE, body))

    async def score(self, token_ids: TokenIds) -> Floats:
        body: dict[str, object] = {
            "token_ids": np.ascontiguousarray(token_ids),
            "sampling_params": {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0},
        }
        answer = (await self.transport.post(_GENERATE, body)).json_object()
        positions = answer.get("prompt_logprobs") or []
        if len(positions) != len(token_ids):
            raise EngineReplyError(
                f"{self.url}: got {len(positions)} prompt log-probs, expected {len(token_ids)}"
            )
        pairs = zip(token_ids[1:], positions[1:], strict=True)
        with replies_of(f"{self.url}{_GENERATE}, {_FORM}"):
            values = [float(at[str(token)]["logprob"]) for token, at in pairs]
        return np.array(values, dtype=np.float32)

    async def abort(self, request_id: str) -> None:
        body: dict[str, object] = {"request_ids": [_ID_PREFIX + request_id]}
        await self.transport.post("/abort_requests", body, timeout_s=10.0)

    async def pause(self) -> None:
        await self.transport.post("/pause?mode=abort", None, timeout_s=120.0)

    async def resume(self) -> None:
        await self.transport.post("/resume", None, timeout_s=120.0)

    async def flush(self) -> None:
        reply = await self.transport.post("/reset_prefix_cache", None, timeout_s=120.0)
        answer = reply.json_object()
        if answer.get("success") is not True:
            raise EngineError(
                f"{self.url}: the prefix cache was not flushed: requests still hold blocks"
            )

    async def push_tensors(self, weights: Weights, version: int) -> None:
        raise EngineError(
            "vLLM takes no weights in a request body: got weight_transfer=tensors, expected disk"
        )

    async def load_folder(self, folder: Path, version: int) -> None:
        body: dict[str, object] = {
            "method": "reload_weights",
            "kwargs": {"weights_path": str(folder.resolve())},
        }
        await self.transport.post("/collective_rpc", body, timeout_s=_UPDATE_TIMEOUT_S)
        await self.flush()
        await self.name_version(version)

    async def name_version(self, version: int) -> None:
        body: dict[str, object] = {"new_version": str(version)}
        await self.transport.post("/update_weight_version", body, timeout_s=60.0)

    async def aclose(self) -> None:
        await self.transport.aclose()

    def _read(self, request: GenerateRequest, reply: HttpReply) -> ServerReply:
        answer = reply.json_object()
        with replies_of(f"{self.url}{_GENERATE}, {_FORM} with one choice"):
            (choice,) = answer["choices"]
            usage = answer["usage"]
            details = usage.get("prompt_tokens_details") or {}
            payload = choice.get("routed_experts")
            sampled = np.array(choice["token_ids"], dtype=np.int32)
            rows = None
            # Rows come whether they were asked for or not.
            if payload is not None and request.routed_experts_start is not None:
                rows = read_vllm(
                    choice,
                    self._layout,
                    num_tokens=len(request.token_ids) + len(sampled),
                    requested_start=request.routed_experts_start,
                )
            return ServerReply(
                request_id=str(answer["request_id"]).removeprefix(_ID_PREFIX),
                token_ids=sampled,
                logprobs=np.array(
                    [float(entry["logprob"]) for entry in choice["logprobs"]["content"]],
                    dtype=np.float32,
                ),
                finish_reason=_REASONS[choice["finish_reason"]],
                num_prompt_tokens=int(usage["prompt_tokens"]),
                weight_versions=(),
                cached_tokens=int(details.get("cached_tokens") or 0),
                rows=None if rows is None else rows.rows,
                rows_start=0 if rows is None else rows.start,
                num_row_bytes=0 if payload is None else len(payload),
            )
