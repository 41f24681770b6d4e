"""Checks against a live server: before it is used at all, and after every weight update.

Flags say what a server was asked to do; only an answer shows what it does. So the start-up probe
looks at both, and reports everything that is wrong at once, with what to change.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from agent_rl.engines.http.inference_server import InferenceServer, ServerFacts, ServerReply
from agent_rl.engines.http.reply_rows import accept_rows
from agent_rl.errors import EngineError, EngineReplyError, EngineSetupError
from agent_rl.types import Floats, GenerateRequest, SamplingParams, TokenIds
from routing_cache import RowLayout

_PROMPT_TOKENS = 24
_NEW_TOKENS = 4
_NUM_SCORED = 3
_START = 16  # inside the prompt, so that an ignored start index shows


@dataclass(frozen=True)
class _Exchange:
    request: GenerateRequest
    reply: ServerReply


async def probe_server(
    server: InferenceServer,
    layout: RowLayout | None,
    *,
    vocab_size: int,
    weight_version: int,
) -> ServerFacts:
    """Ask the server about itself, sample twice, and name its weight version.

    Args:
        layout: rows that replay needs; None when nothing is captured, then rows are not looked at.

    Raises:
        EngineSetupError: one line for every problem found.
        EngineUnavailableError: the server is not up.
    """
    facts = await server.facts()
    problems: list[str] = []
    if layout is not None:
        problems += facts.hazards
        if not facts.captures_routing:
            problems.append(
                "the server does not return routing rows; start it with "
                "--enable-return-routed-experts or set engine.capture_routing=false"
            )
    if not problems:
        await server.name_version(weight_version)
        try:
            whole = await _sample(server, vocab_size, 0 if layout else None)
            suffix = await _sample(server, vocab_size, _START if layout else None)
        except EngineReplyError as error:
            problems.append(f"the probe's reply cannot be read: {error}")
        else:
            problems += _reply_problems(whole, weight_version)
            if layout is not None:
                problems += _row_problems(whole, suffix, layout)
    if problems:
        raise EngineSetupError([f"{facts.engine} at {server.url}: {p}" for p in problems])
    return facts


async def verify_update(
    server: InferenceServer,
    version: int,
    *,
    vocab_size: int,
    expected: Sequence[Floats] | None = None,
    tolerance: float = 1e-4,
) -> None:
    """After an update: the server samples with the new version, from an empty prefix cache.

    Args:
        expected: log-probs ``[23]`` of each of :func:`scored_prompts` under the new weights, when
            known.
        tolerance: largest difference allowed, absolute. One prompt may miss it if both others
            hold it: two experts whose router logits tie are chosen by the order of a sum, and the
            log-probs of the prompt's rest follow from the choice. Weights that are not there show
            in more than one prompt.

    Raises:
        EngineError: the version is another, the cache was not flushed, the logits are dead, or
            they are not those of the new weights.
    """
    exchange = await _sample(server, vocab_size, None)
    problems = list(_reply_problems(exchange, version))
    if exchange.reply.cached_tokens:
        problems.append(
            f"the prefix cache survived the update: got {exchange.reply.cached_tokens} cached "
            "tokens for the first prompt after it, expected 0; rows of old weights would be reused"
        )
    if expected is not None:
        gap = await _score_gap(server, scored_prompts(vocab_size), expected, tolerance)
        if not gap <= tolerance:
            problems.append(
                f"the weights did not arrive: log-probs differ from the trainer's by {gap:.2e}, "
                f"expected at most {tolerance:.0e}; the server kept some of the old weights"
            )
    if problems:
        raise EngineError(f"{server.engine} at {server.url}: {'; '.join(problems)}")


def scored_prompts(vocab_size: int) -> tuple[TokenIds, ...]:
    """Prompts ``[24]``, the same every time, so that a surviving prefix shows.

    The first one is sampled from and scored, the others are scored where it misses the tolerance.
    """
    rng = np.random.default_rng(20251011)
    size = (_NUM_SCORED, _PROMPT_TOKENS)
    return tuple(rng.integers(0, vocab_size, size, dtype=np.int32))


async def _score_gap(
    server: InferenceServer,
    prompts: Sequence[TokenIds],
    expected: Sequence[Floats],
    tolerance: float,
) -> float:
    """Largest difference on the first prompt, or on all the others if the first one misses."""

    async def gap(number: int) -> float:
        got = await server.score(prompts[number])
        return float(np.abs(got - expected[number]).max())

    first = await gap(0)
    if first <= tolerance:
        return first
    others = [await gap(number) for number in range(1, len(prompts))]
    return first if any(not other <= tolerance for other in others) else max(others)


async def _sample(server: InferenceServer, vocab_size: int, start: int | None) -> _Exchange:
    request = GenerateRequest(
        session_id="probe",
        token_ids=scored_prompts(vocab_size)[0],
        sampling=SamplingParams(temperature=1.0, max_new_tokens=_NEW_TOKENS, seed=0),
        routed_experts_start=start,
    )
    return _Exchange(request, await server.generate(request, secrets.token_hex(12)))


def _reply_problems(exchange: _Exchange, version: int) -> Iterator[str]:
    reply = exchange.reply
    if not 1 <= len(reply.token_ids) <= _NEW_TOKENS:
        yield f"got {len(reply.token_ids)} tokens, expected 1 to {_NEW_TOKENS}"
    if len(reply.logprobs) != len(reply.token_ids):
        yield f"got {len(reply.logprobs)} log-probs for {len(reply.token_ids)} tokens"
    elif not np.isfinite(reply.logprobs).all():
        yield f"got log-probs {reply.logprobs.tolist()}, expected finite ones"
    elif len(reply.logprobs) > 1 and np.ptp(reply.logprobs) == 0.0:
        yield (
            f"every sampled token has the same log-prob {reply.logprobs[0]:.4f}: the output head "
            "is dead; a model with tied embeddings must be served from a folder that holds "
            "lm_head.weight (agent_rl.engines.http.serving_folder writes one)"
        )
    if reply.weight_versions and set(reply.weight_versions) != {str(version)}:
        yield f"got weight version {reply.weight_versions}, expected {version}"


def _row_problems(whole: _Exchange, suffix: _Exchange, layout: RowLayout) -> Iterator[str]:
    if suffix.reply.rows is not None and suffix.reply.rows_start != _START:
        yield (
            f"the start index is ignored: got {len(suffix.reply.rows)} rows when asked for those "
            f"from {_START}; every turn would send the whole conversation again: use a newer server"
        )
        return
    rows = []
    for exchange in (whole, suffix):
        start = exchange.request.routed_experts_start or 0
        try:
            found = accept_rows(
                exchange.reply, layout, num_prompt=_PROMPT_TOKENS, start=start, where="probe"
            )
        except EngineReplyError as error:
            yield str(error)
            return
        assert found is not None  # a probe refuses a reply without
        rows.append(found)
    chosen = len(np.unique(rows[0]))
    if chosen <= layout.moe_top_k:
        yield (
            f"the router seems to choose the same {chosen} experts for every token: the capture "
            "hook does not see the real choice"
        )
    prompt_part = _PROMPT_TOKENS - _START
    if not np.array_equal(
        np.sort(rows[0][_START:_PROMPT_TOKENS], axis=2), np.sort(rows[1][:prompt_part], axis=2)
    ):
        yield (
            f"rows asked from {_START} are not the rows of these tokens in the full answer: the "
            "start index means something else here"
        )
