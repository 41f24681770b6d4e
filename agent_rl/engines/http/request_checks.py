"""Checks of a request before it is sent and of its reply, and the seed of a turn."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np

from agent_rl.engines.http.inference_server import ServerReply
from agent_rl.errors import CapacityError, EngineAbortedError, EngineError, EngineReplyError
from agent_rl.types import GenerateRequest, SamplingParams


def check_request(
    request: GenerateRequest,
    *,
    vocab_size: int,
    context_length: int,
    captures_routing: bool,
    gives_full_logprobs: bool,
    where: str,
) -> None:
    """Refuse what a server would fail on: an id outside the vocabulary ends SGLang and vLLM.

    Raises:
        CapacityError: prompt plus ``max_new_tokens`` exceeds ``context_length``.
        EngineError: anything else that is malformed.
    """
    ids, sampling, start = request.token_ids, request.sampling, request.routed_experts_start
    if len(ids) == 0 or sampling.max_new_tokens < 1 or sampling.temperature < 0:
        raise EngineError(
            f"{where}: malformed request: got {len(ids)} prompt tokens, max_new_tokens="
            f"{sampling.max_new_tokens}, temperature={sampling.temperature}; expected at "
            "least 1, at least 1, at least 0"
        )
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise EngineError(
            f"{where}: ids outside the vocabulary: got {int(ids.min())}..{int(ids.max())}, "
            f"expected 0..{vocab_size - 1}"
        )
    if len(ids) + sampling.max_new_tokens > context_length:
        raise CapacityError(
            f"{where}: got {len(ids)} prompt tokens + {sampling.max_new_tokens} new, expected "
            f"at most {context_length} together; serve a longer context or lower the agent's limits"
        )
    if start is not None and not captures_routing:
        raise EngineError(
            f"{where}: routing rows were asked of an engine that does not capture them; set "
            "engine.capture_routing or pass routed_experts_start=None"
        )
    if start is not None and not 0 <= start <= len(ids):
        raise EngineError(
            f"{where}: routed_experts_start is outside the prompt: got {start}, "
            f"expected 0..{len(ids)}"
        )
    if request.return_full_logprobs and not gives_full_logprobs:
        raise EngineError(
            f"{where}: log-probs over the whole vocabulary are not served by this engine; use the "
            "local one for that study, or SGLang with a vocabulary of at most 1,024"
        )


def turn_sampling(sampling: SamplingParams, num_prompt: int) -> SamplingParams:
    """Return ``sampling`` with a seed that depends on the position too: the same in every run."""
    if sampling.seed is None:
        return sampling
    text = f"{sampling.seed}/{num_prompt}".encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return replace(sampling, seed=int.from_bytes(digest, "little") >> 1)


def check_reply(
    request: GenerateRequest, reply: ServerReply, request_id: str, *, vocab_size: int, where: str
) -> None:
    """Refuse a reply that is not a whole answer to this request; rows are judged apart.

    Raises:
        EngineAbortedError: the server ended it early.
        EngineReplyError: another request's reply, or lengths or ids that do not fit.
    """
    num_prompt, num_sampled = len(request.token_ids), len(reply.token_ids)
    most = request.sampling.max_new_tokens
    if reply.finish_reason == "abort":
        raise EngineAbortedError(f"{where}: the server aborted it after {num_sampled} tokens")
    if reply.request_id != request_id:
        problem = f"got the reply of request {reply.request_id!r}, expected {request_id!r}"
    elif reply.num_prompt_tokens != num_prompt:
        problem = f"got a reply to {reply.num_prompt_tokens} prompt tokens, expected {num_prompt}"
    elif not 1 <= num_sampled <= most:
        problem = f"got {num_sampled} sampled tokens, expected 1..{most}"
    elif int(reply.token_ids.min()) < 0 or int(reply.token_ids.max()) >= vocab_size:
        ids = reply.token_ids
        problem = f"got ids {int(ids.min())}..{int(ids.max())}, expected 0..{vocab_size - 1}"
    elif len(reply.logprobs) != num_sampled or not np.isfinite(reply.logprobs).all():
        problem = f"got {len(reply.logprobs)} log-probs, expected {num_sampled} finite ones"
    else:
        return
    raise EngineReplyError(f"{where}: {problem}; the server mixes up its requests")
