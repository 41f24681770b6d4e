"""Rules of sampling, lengths, inference servers and what runs beside the update."""

from __future__ import annotations

from collections.abc import Iterator

from agent_rl.config.objective import replays_rows
from agent_rl.config.rules.fault import Fault, Rule, untouched
from agent_rl.config.schema import SERVERS, RunConfig


def _sampling(config: RunConfig) -> Iterator[Fault]:
    sampling = config.sampling
    for key, got, full in (("top_p", sampling.top_p, 1.0), ("top_k", sampling.top_k, 0)):
        if got != full:
            yield (
                f"sampling.{key}",
                f"got {got}, expected {full} (off): the trainer scores the full distribution, a "
                "cut one would bias every importance ratio",
            )


def _lengths(config: RunConfig) -> Iterator[Fault]:
    agent = config.agent
    if agent.max_new_tokens >= agent.max_tokens:
        yield (
            "agent.max_new_tokens",
            f"got {agent.max_new_tokens}, expected below agent.max_tokens ({agent.max_tokens})",
        )
    if config.trainer.micro_batch_tokens < agent.max_tokens:
        yield (
            "trainer.micro_batch_tokens",
            f"got {config.trainer.micro_batch_tokens}, expected at least agent.max_tokens "
            f"({agent.max_tokens}): the longest trajectory must fit one micro-batch",
        )
    if config.rollout.concurrency > config.engine.max_sessions:
        yield (
            "rollout.concurrency",
            f"got {config.rollout.concurrency}, "
            f"expected at most engine.max_sessions ({config.engine.max_sessions})",
        )


def _servers(config: RunConfig) -> Iterator[Fault]:
    engine = config.engine
    if engine.kind == "vllm" and engine.weight_transfer != "disk":
        yield (
            "engine.weight_transfer",
            f"got {engine.weight_transfer}, expected disk: vLLM loads weights from folders only",
        )
    if engine.kind != "local" and engine.dtype.endswith("_simulated"):
        yield (
            "engine.dtype",
            f"got {engine.dtype}, expected float32 or bfloat16: only the local engine simulates "
            "low precision; give a server a quantised checkpoint instead",
        )
    if engine.kind == "local":
        yield from untouched("engine", engine, SERVERS)
    for url in engine.urls:
        if not url.startswith(("http://", "https://")):
            yield "engine.urls", f"got {url!r}, expected http://HOST:PORT"


def _overlap(config: RunConfig) -> Iterator[Fault]:
    replays = replays_rows(config.routing.replay)
    if config.train.overlap_rollout and replays and config.routing.max_staleness < 1:
        yield (
            "routing.max_staleness",
            f"got {config.routing.max_staleness}, expected 1 or more because "
            "train.overlap_rollout=true trains on rollouts of the weights before the newest",
        )


INFERENCE_RULES: tuple[Rule, ...] = (
    _sampling,
    _lengths,
    _servers,
    _overlap,
)
