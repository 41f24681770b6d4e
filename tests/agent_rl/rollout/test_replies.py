"""Rows that come again from an earlier start: of the same tokens, or refused."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from rollout_fakes import ScriptedEnv, run, says, words_tokenizer

from agent_rl.config.schema import AgentConfig
from agent_rl.engines.scripted import ScriptedGenerator, synthetic_rows
from agent_rl.errors import EngineError
from agent_rl.rollout.agent import run_trajectory
from agent_rl.rollout.chat import CompactRenderer
from agent_rl.rollout.replies import check_completion
from agent_rl.types import (
    Completion,
    GenerateRequest,
    Rows,
    SamplingParams,
    Status,
    TokenIds,
    Trajectory,
)
from routing_cache import RoutingCache

TOKENIZER = words_tokenizer()
LAST_TURN = 2
Change = Callable[[TokenIds, Rows], Rows]


class Moves(ScriptedGenerator):
    """In the last turn the session is on another engine, which sends all rows from 0."""

    def __init__(self, change: Change, version: int | None = None) -> None:
        super().__init__(says(TOKENIZER, "view", "test", "submit"))
        self._change, self._moved_version = change, version

    async def generate(self, request: GenerateRequest) -> Completion:
        completion = await super().generate(request)
        if len(self.requests) <= LAST_TURN:
            return completion
        fed = np.concatenate([request.token_ids, completion.token_ids[:-1]]).astype(np.int32)
        version = self.weight_version if self._moved_version is None else self._moved_version
        rows = self._change(fed, synthetic_rows(fed, self.row_layout, version))
        versions = (version,)
        return replace(
            completion, routed_experts=rows, routed_experts_start=0, weight_versions=versions
        )


def rollout(generator: ScriptedGenerator) -> tuple[Trajectory, RoutingCache]:
    cache = RoutingCache(generator.row_layout)

    async def work(executor: ThreadPoolExecutor) -> Trajectory:
        return await run_trajectory(
            ScriptedEnv(),
            generator,
            cache,
            CompactRenderer(TOKENIZER, max_observation_tokens=16),
            AgentConfig(max_turns=4, max_tokens=200, max_new_tokens=8),
            group_id="g",
            member=0,
            seed=1,
            executor=executor,
        )

    return run(work), cache


def same(fed: TokenIds, rows: Rows) -> Rows:
    return rows


def one_expert_other(fed: TokenIds, rows: Rows) -> Rows:
    changed = rows.copy()
    changed[1, 0, 0] = (changed[1, 0].max() + 3) % 8
    return changed


def of_other_tokens(fed: TokenIds, rows: Rows) -> Rows:
    return synthetic_rows(fed[::-1].copy(), Moves(same).row_layout, 0)


def one_place_off(fed: TokenIds, rows: Rows) -> Rows:
    """The number of rows is right, but the first one is row 1."""
    return np.concatenate([rows[1:], rows[-1:]])


def test_the_same_rows_again_are_accepted_and_noted() -> None:
    trajectory, cache = rollout(Moves(same))
    assert trajectory.status is Status.COMPLETED
    stored = trajectory.turns[LAST_TURN].prompt_end - trajectory.turns[0].prompt_end
    assert trajectory.details["rows_compared"] >= stored
    assert trajectory.details["rows_shared_least"] == 1.0
    assert cache.stats().disagreements.differing == 0


def test_a_few_other_experts_are_counted_and_the_first_ones_kept() -> None:
    trajectory, cache = rollout(Moves(one_expert_other))
    assert trajectory.status is Status.COMPLETED
    assert 0.9 < float(trajectory.details["rows_shared_least"]) < 1.0
    assert cache.stats().disagreements.differing == 1
    assert trajectory.branch.routed_experts is not None
    rows, _ = trajectory.branch.routed_experts.gather(start=1, stop=2)
    expected = synthetic_rows(trajectory.branch.token_ids[:2], cache.layout, 0)[1:2]
    assert np.array_equal(rows, expected)


@pytest.mark.parametrize("change", [of_other_tokens, one_place_off])
def test_rows_of_other_tokens_fail_the_trajectory(change: Change) -> None:
    trajectory, _ = rollout(Moves(change))
    assert (trajectory.status, trajectory.reward) == (Status.FAILED, None)
    assert "are of other tokens" in trajectory.error


def test_rows_of_other_weights_may_differ_and_are_counted() -> None:
    trajectory, cache = rollout(Moves(same, version=1))
    assert trajectory.status is Status.COMPLETED
    assert float(trajectory.details["rows_shared_least"]) < 0.75
    assert cache.stats().disagreements.differing > 0


@pytest.mark.parametrize("start", [-1, 5, 9])
def test_a_start_before_the_first_token_or_after_the_asked_one_is_refused(start: int) -> None:
    request = GenerateRequest("s", np.zeros(10, np.int32), SamplingParams(), 4)
    rows = np.zeros((10 + 2 - 1 - start, 1, 1), np.uint8)
    ids, logprobs = np.zeros(2, np.int32), np.zeros(2, np.float32)
    with pytest.raises(EngineError, match="do not cover"):
        check_completion(request, Completion(ids, logprobs, "stop", (0,), rows, start))
