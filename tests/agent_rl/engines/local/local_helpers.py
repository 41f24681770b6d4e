"""Driving the local engine in tests, and the reference it is compared with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from agent_rl.config.schema import EngineConfig
from agent_rl.engines.local import LocalEngine
from agent_rl.types import Completion, Floats, GenerateRequest, Rows, SamplingParams, TokenIds

_T = TypeVar("_T")
STOP = 7
MakeFolder = Callable[..., Path]


def build_model(seed: int = 0, **changes: object) -> Qwen3MoeForCausalLM:
    """Large initial weights, so that routing and next tokens are far from uniform."""
    torch.manual_seed(seed)
    settings: dict[str, object] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
    }
    config = Qwen3MoeConfig(**(settings | changes))
    return Qwen3MoeForCausalLM(config).eval().requires_grad_(False)


def with_engine(
    folder: Path, work: Callable[[LocalEngine], Coroutine[Any, Any, _T]], **settings: object
) -> _T:
    """Run ``work`` on a fresh float32 engine, with a deadline so that a hang is a failure."""
    config: dict[str, Any] = {"dtype": "float32", "max_sessions": 16} | settings
    max_tokens = config.pop("max_tokens", 96)

    async def limited() -> _T:
        engine = LocalEngine(folder, EngineConfig(**config), max_tokens=max_tokens)
        try:
            async with asyncio.timeout(60):
                return await work(engine)
        finally:
            await engine.aclose()

    return asyncio.run(limited())


def prompt(seed: int, length: int = 12, vocab: int = 64) -> TokenIds:
    return np.random.default_rng(seed).integers(8, vocab, length).astype(np.int32)


def ask(
    session_id: str,
    token_ids: TokenIds,
    *,
    start: int | None = 0,
    temperature: float = 1.0,
    max_new_tokens: int = 8,
    seed: int | None = 1,
    full: bool = False,
    stop: tuple[int, ...] = (STOP,),
) -> GenerateRequest:
    sampling = SamplingParams(temperature, max_new_tokens, stop, seed)
    return GenerateRequest(session_id, token_ids, sampling, start, full)


async def play(
    engine: LocalEngine, session_id: str, *, seed: int, num_turns: int
) -> tuple[TokenIds, list[Completion]]:
    """A dialogue whose observations are random but depend on ``seed`` only."""
    token_ids, replies, start = prompt(seed), [], 0
    for turn in range(num_turns):
        reply = await engine.generate(ask(session_id, token_ids, start=start, seed=seed))
        replies.append(reply)
        token_ids = np.concatenate([token_ids, reply.token_ids])
        start = len(token_ids) - 1
        if turn < num_turns - 1:
            token_ids = np.concatenate([token_ids, prompt(1000 * seed + turn, 3 + turn)])
    return token_ids, replies


@torch.inference_mode()
def reference(model: Qwen3MoeForCausalLM, token_ids: TokenIds) -> tuple[Floats, Rows]:
    """Logits ``[T, V]`` and routing rows ``[T, L, K]`` of one plain forward."""
    chosen: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _m, _a, output: chosen.append(output[2]))
        for module in model.modules()
        if isinstance(module, Qwen3MoeTopKRouter)
    ]
    logits = model(torch.from_numpy(token_ids.astype(np.int64))[None]).logits[0]
    for hook in hooks:
        hook.remove()
    return logits.numpy(), torch.stack(chosen, dim=1).numpy().astype(np.uint8)


def log_softmax(logits: Floats, temperature: float = 1.0) -> Floats:
    return torch.log_softmax(torch.from_numpy(logits) / temperature, dim=-1).numpy()
