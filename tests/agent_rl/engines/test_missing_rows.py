"""Rows that a server loses or damages, from its reply to the trainer's step and its metrics.

Everything is real but the wire: the tiny policy samples behind ``InferenceServer``, which spoils
the rows of some replies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from agent_rl.config.schema import (
    AgentConfig,
    AlgorithmConfig,
    EngineConfig,
    RolloutConfig,
    RoutingConfig,
    RunConfig,
    SandboxConfig,
    TasksConfig,
    TrainConfig,
)
from agent_rl.engines.http.inference_server import ServerFacts, ServerReply
from agent_rl.engines.http.server_fleet import DIALECTS
from agent_rl.engines.local import LocalEngine
from agent_rl.errors import ReplayError, RolloutError
from agent_rl.loop import train_steps
from agent_rl.model.policies import policy_folder
from agent_rl.protocols import Weights
from agent_rl.run.parts import Assembly, assemble
from agent_rl.types import Floats, GenerateRequest, Group, Rows, TokenIds

pytestmark = [pytest.mark.slow, pytest.mark.megatron]
Spoil = Callable[[int, Rows], Rows | None]  # by the number of the reply
POLICY = policy_folder("builtin:tiny_moe")


@dataclass
class PolicyServer:
    """The tiny policy as an inference server whose ``spoil`` sees every reply but the probe's."""

    spoil: Spoil
    policy: LocalEngine
    engine: str = "sglang"
    num_replies: int = 0
    url: str = "http://here"
    gives_full_logprobs: bool = False
    seeds_by_position: bool = True
    named: int = 0
    spoilt: list[int] = field(default_factory=list[int])

    async def facts(self) -> ServerFacts:
        return ServerFacts("sglang", "test", str(POLICY), 4096, str(self.named), True)

    async def generate(self, request: GenerateRequest, request_id: str) -> ServerReply:
        said = await self.policy.generate(replace(request, session_id=request_id))
        await self.policy.end_session(request_id)
        rows = said.routed_experts
        if request.session_id != "probe" and rows is not None:
            spoilt = self.spoil(self.num_replies, rows.copy())
            if spoilt is None or not np.array_equal(spoilt, rows):
                self.spoilt.append(self.num_replies)
            self.num_replies, rows = self.num_replies + 1, spoilt
        return ServerReply(
            request_id=request_id,
            token_ids=said.token_ids,
            logprobs=said.logprobs,
            finish_reason=said.finish_reason,
            num_prompt_tokens=len(request.token_ids),
            weight_versions=(str(self.named),),
            rows=rows,
            rows_start=said.routed_experts_start,
        )

    async def score(self, token_ids: TokenIds) -> Floats:
        raise NotImplementedError

    async def push_tensors(self, weights: Weights, version: int) -> None:
        await self.policy.load_weights(weights, version)
        self.named = version

    async def name_version(self, version: int) -> None:
        self.named = version

    async def abort(self, request_id: str) -> None: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def aclose(self) -> None:
        await self.policy.aclose()


class Recorder:
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def step_done(self, step: int, groups: Sequence[Group], metrics: dict[str, float]) -> bool:
        self.rows.append(metrics)
        return False


@dataclass(frozen=True)
class Outcome:
    metrics: list[dict[str, float]]  # of each step
    counted: dict[str, float]  # at the end
    weight_version: int
    server: PolicyServer
    error: Exception | None


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``train(spoil, **routing)``: a step of training, and what came of them."""

    def run(spoil: Spoil, **routing: object) -> Outcome:
        servers: list[PolicyServer] = []

        def connect(transport: object, model: object) -> PolicyServer:
            config = EngineConfig(dtype="float32", max_sessions=64)
            servers.append(PolicyServer(spoil, LocalEngine(POLICY, config, max_tokens=256)))
            return servers[-1]

        monkeypatch.setitem(DIALECTS, "sglang", DIALECTS["sglang"]._replace(connect=connect))
        torch.set_num_threads(1)
        return asyncio.run(_train(run_config(tmp_path, **routing), servers))

    return run


def run_config(root: Path, **routing: object) -> RunConfig:
    return RunConfig(
        run_root=str(root),
        tasks=TasksConfig(num_train=40, num_heldout=4),
        sandbox=SandboxConfig(num_workers=2),
        agent=AgentConfig(max_tokens=200),
        engine=EngineConfig(
            kind="sglang", dtype="float32", urls=("http://here",), verify_weights=False
        ),
        routing=RoutingConfig(**routing),
        algorithm=AlgorithmConfig(group_size=4, groups_per_step=4, num_mini_steps=1),
        rollout=RolloutConfig(retry_wait_s=0.0, concurrency=1),
        train=TrainConfig(steps=1),
    )


async def _train(config: RunConfig, servers: list[PolicyServer]) -> Outcome:
    parts: Assembly = assemble(config)
    seen, error = Recorder(), None
    try:
        await train_steps(parts.loop, seen, first_step=1)
    except (ReplayError, RolloutError) as caught:
        error = caught
    finally:
        counted = parts.routing_metrics() | parts.engine_metrics()
        version = parts.loop.trainer.weight_version
        await parts.aclose()
    return Outcome(seen.rows, counted, version, servers[0], error)


def sometimes(number: int, rows: Rows) -> Rows | None:
    """Every seventh reply has no rows, or a last one that is bad or marked missing."""
    kind, due = divmod(number, 7)
    if due or not len(rows):
        return rows
    if kind % 3 == 0:
        return None
    rows[-1] = 255 if kind % 3 == 1 else rows[-1, :, :1]
    return rows


def test_a_mixed_run_trains_without_lost_rows_and_counts_them(train) -> None:
    outcome = train(sometimes, replay="mixed", max_missing_fraction=0.5)
    assert outcome.error is None
    assert len(outcome.server.spoilt) > 5
    assert outcome.weight_version == 1
    (metrics,) = outcome.metrics
    assert 0 < metrics["missing_fraction"] < 0.5
    assert 0.5 < metrics["replayed_fraction"] < 1
    assert metrics["grad_norm"] > 0
    assert metrics["num_failed"] == 0
    assert outcome.counted["routing_bad_rows"] > 0
    assert outcome.counted["engine_bad_replies"] == 0


def test_a_mixed_run_stops_above_the_allowed_fraction(train) -> None:
    outcome = train(lambda number, rows: None, replay="mixed", max_missing_fraction=0.2)
    assert isinstance(outcome.error, ReplayError)
    assert "got=1.0000" in str(outcome.error)
    assert "routing.max_missing_fraction=0.2" in str(outcome.error)
    assert (outcome.weight_version, outcome.metrics) == (0, [])


def first_ones(number: int, rows: Rows) -> Rows | None:
    return sometimes(7 * number, rows) if number < 3 else rows


def test_a_strict_run_refuses_such_replies_and_plays_their_episodes_again(train) -> None:
    outcome = train(first_ones, replay="r3")
    assert outcome.error is None
    assert outcome.server.spoilt == [0, 1, 2]
    assert outcome.counted["engine_bad_replies"] == 3
    assert outcome.counted["routing_bad_rows"] == 0
    assert [m["replayed_fraction"] for m in outcome.metrics] == [1.0]


def test_a_strict_run_without_any_rows_ends_before_a_weight_moves(train) -> None:
    outcome = train(lambda number, rows: None, replay="r3")
    assert isinstance(outcome.error, RolloutError)
    assert outcome.weight_version == 0


@pytest.mark.parametrize("replay", ["off", "r2"])
def test_a_run_that_needs_no_rows_goes_on_without_them(train, replay: str) -> None:
    outcome = train(lambda number, rows: None, replay=replay)
    assert outcome.error is None
    assert outcome.weight_version == 1
    assert [m["missing_fraction"] for m in outcome.metrics] == [0.0]


def test_another_number_of_rows_is_refused_in_every_mode(train) -> None:
    outcome = train(lambda number, rows: rows[:-1], replay="mixed", max_missing_fraction=1.0)
    assert isinstance(outcome.error, RolloutError)
    assert "does not cover the tokens" in str(outcome.error)
