"""An engine over the stand-in server, and requests to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import torch
from fake_sglang import (
    MODEL,
    VOCAB_SIZE,
    FakeSGLang,
    true_rows,
)

from agent_rl.config.schema import EngineConfig
from agent_rl.engines.http.deployment import Deployment
from agent_rl.engines.http.http_engine import HttpEngine
from agent_rl.engines.http.server_weights import WeightReference
from agent_rl.engines.http.transport import HttpTransport, TransportOptions
from agent_rl.engines.sglang import SGLangServer
from agent_rl.model.policies import policy_folder
from agent_rl.types import Completion, GenerateRequest, SamplingParams

WEIGHTS = {"model.embed_tokens.weight": torch.ones(2, 2)}


FAST = TransportOptions(backoff_s=0.001)


async def connect(
    fake: FakeSGLang,
    name: str = "e",
    *,
    reference: WeightReference | None = None,
    work_dir: Path = Path("unused"),
    refuse_bad_rows: bool = True,
    **settings: object,
) -> HttpEngine:
    server = SGLangServer(HttpTransport(f"http://{name}", FAST, fake), MODEL)
    own = {"kind": "sglang", "dtype": "float32", "max_sessions": 64} | settings
    deployment = Deployment(
        EngineConfig(**own),
        policy_folder("builtin:tiny_moe"),
        work_dir,
        refuse_bad_rows=refuse_bad_rows,
        drain_timeout_s=0.5,
    )
    return await HttpEngine.connect(server, MODEL, deployment, name=name, reference=reference)


def ask(
    ids: np.ndarray, session: str = "s", start: int | None = 0, new: int = 6
) -> GenerateRequest:
    return GenerateRequest(session, ids.astype(np.int32), SamplingParams(1.0, new), start)


def ids(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).astype(np.int32)


def assert_true_rows(prompt: np.ndarray, completion: Completion, weights: int = 0) -> None:
    whole = np.concatenate([prompt, completion.token_ids])
    expected = true_rows(whole, weights)[completion.routed_experts_start : -1, 1:]
    np.testing.assert_array_equal(completion.routed_experts, expected)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(scenario())
