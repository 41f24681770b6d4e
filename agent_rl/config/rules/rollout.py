"""Rules of sampling, lengths, inference servers and sandboxes."""

from __future__ import annotations

from collections.abc import Iterator

from agent_rl.config.objective import replays_rows
from agent_rl.config.rules.fault import Fault, Rule, untouched
from agent_rl.config.schema import EngineConfig, RunConfig

_OF_SERVERS = (
    *("urls", "num_servers", "tensor_parallel", "device", "weight_transfer", "verify_weights"),
    *("start_timeout_s", "extra_args"),
)


def _sampling(config: RunConfig) -> Iterator[Fault]:
    if config.sampling.temperature <= 0:
        yield (
            "sampling.temperature",
            (
                f"got {config.sampling.temperature}, expected above 0: greedy groups have no "
                "signal; evaluations have eval.temperature"
            ),
        )
    if config.sampling.top_p != 1.0:
        yield (
            "sampling.top_p",
            (
                f"got {config.sampling.top_p}, expected 1.0: the trainer scores the full "
                "distribution, a cut one would bias every importance ratio"
            ),
        )
    if config.sampling.top_k != 0:
        yield (
            "sampling.top_k",
            (
                f"got {config.sampling.top_k}, expected 0 (off): the trainer scores the full "
                "distribution, a cut one would bias every importance ratio"
            ),
        )


def _lengths(config: RunConfig) -> Iterator[Fault]:
    agent = config.agent
    if agent.max_new_tokens >= agent.max_tokens:
        yield (
            "agent.max_new_tokens",
            (f"got {agent.max_new_tokens}, expected below agent.max_tokens ({agent.max_tokens})"),
        )
    if config.trainer.micro_batch_tokens < agent.max_tokens:
        yield (
            "trainer.micro_batch_tokens",
            (
                f"got {config.trainer.micro_batch_tokens}, expected at least agent.max_tokens "
                f"({agent.max_tokens}): the longest trajectory must fit one micro-batch"
            ),
        )
    if config.engine.max_sessions < 1 or config.rollout.concurrency > config.engine.max_sessions:
        yield (
            "rollout.concurrency",
            (
                f"got {config.rollout.concurrency}, "
                f"expected at most engine.max_sessions ({config.engine.max_sessions})"
            ),
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
        where = "engine.kind=sglang and vllm"
        yield from untouched("engine", engine, EngineConfig(), where, _OF_SERVERS)
    for url in engine.urls:
        if not url.startswith(("http://", "https://")):
            yield "engine.urls", f"got {url!r}, expected http://HOST:PORT"


def _sandbox(config: RunConfig) -> Iterator[Fault]:
    if config.sandbox.kind == "process" and not config.sandbox.allow_unsafe:
        yield (
            "sandbox.kind",
            (
                "got process, which isolates nothing: expected bubblewrap, unshare or auto, "
                "or sandbox.allow_unsafe=true to accept that the policy's code runs as you"
            ),
        )


def _overlap(config: RunConfig) -> Iterator[Fault]:
    replays = replays_rows(config.routing.replay)
    if config.train.overlap_rollout and replays and config.routing.max_staleness < 1:
        yield (
            "routing.max_staleness",
            f"got {config.routing.max_staleness}, expected 1 or more because "
            "train.overlap_rollout=true trains on rollouts of the weights before the newest",
        )


ROLLOUT_RULES: tuple[Rule, ...] = (
    _sampling,
    _lengths,
    _servers,
    _sandbox,
    _overlap,
)
