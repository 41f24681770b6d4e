"""One trajectory: tokens, masks, rows, limits, and what failures turn into."""

from __future__ import annotations

import asyncio
import threading
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
    SamplingParams,
    Status,
    TokenIds,
    Trajectory,
)
from envs.base import Observation, Score
from envs.errors import InfrastructureError
from routing_cache import RoutingCache, RowsLease

TOKENIZER = words_tokenizer()
RENDERER = CompactRenderer(TOKENIZER, max_observation_tokens=16)
CONFIG = AgentConfig(max_turns=6, max_tokens=200, max_new_tokens=8, max_observation_tokens=16)
SIX_TURNS = ("view", "test", "replace 1 a", "test", "view", "submit")


def rollout(
    env: ScriptedEnv,
    generator: ScriptedGenerator,
    *,
    config: AgentConfig = CONFIG,
    cache: RoutingCache | None = None,
) -> Trajectory:
    async def work(executor: ThreadPoolExecutor) -> Trajectory:
        return await run_trajectory(
            env,
            generator,
            cache,
            RENDERER,
            config,
            group_id="g",
            member=0,
            seed=1,
            executor=executor,
        )

    return run(work)


def test_tokens_are_prompt_completions_and_observations_in_order() -> None:
    env = ScriptedEnv(replies=["line 1 a", "fail"])
    t = rollout(env, ScriptedGenerator(says(TOKENIZER, "view", "test", "submit")))
    text = TOKENIZER.decode(t.branch.token_ids)
    assert text == (
        "<user> fix a <end> <assistant> view <end> <obs> line 1 a <end> "
        "<assistant> test <end> <obs> fail <end> <assistant> submit <end>"
    )
    assert env.actions == ["view", "test", "submit"]
    assert (
        TOKENIZER.decode(t.branch.token_ids[t.branch.loss_mask])
        == "view <end> test <end> submit <end>"
    )
    assert (t.branch.rollout_logprobs[~t.branch.loss_mask] == 0).all()
    assert (t.branch.rollout_logprobs[t.branch.loss_mask] == np.float32(-0.5)).all()
    assert (t.status, t.stop_reason, t.reward) == (Status.COMPLETED, "submit", 1.0)
    assert t.patch == b"diff"
    assert env.num_closed == 1
    for turn in t.turns:
        assert t.branch.loss_mask[turn.prompt_end : turn.completion_end].all()
        assert not t.branch.loss_mask[turn.prompt_end - 1]


def test_six_turns_ask_for_six_suffixes_and_every_row_comes_once() -> None:
    generator = ScriptedGenerator(says(TOKENIZER, *SIX_TURNS))
    cache = RoutingCache(generator.row_layout)
    t = rollout(ScriptedEnv(), generator, cache=cache)
    starts = [r.routed_experts_start for r in generator.requests]
    ends = [turn.completion_end - 1 for turn in t.turns]
    assert starts == [0, *ends[:-1]]
    assert sum(turn.rows_requested for turn in t.turns) == len(t.branch.token_ids) - 1
    assert t.branch.routed_experts is not None
    t.branch.routed_experts.verify(t.branch.token_ids)
    rows, present = t.branch.routed_experts.gather(stop=len(t.branch.token_ids) - 1)
    assert present.all()
    expected = synthetic_rows(t.branch.token_ids[:-1], generator.row_layout, 0)
    np.testing.assert_array_equal(rows, expected)
    assert cache.stats().rows_recorded == len(t.branch.token_ids) - 1


def test_every_next_prompt_extends_the_ids_so_far() -> None:
    """Sampled ids are kept even where their text would be tokenised otherwise."""
    # <unk> is one sampled id, but its text encodes to three.
    odd = np.array([TOKENIZER.unk_id, TOKENIZER.end_id], dtype=np.int32)
    generator = ScriptedGenerator(
        lambda request, turn: odd if turn == 0 else says(TOKENIZER, "submit")(request, 0)
    )
    t = rollout(ScriptedEnv(replies=["bad"]), generator)
    assert TOKENIZER.encode(t.turns[0].action).tolist() != [TOKENIZER.unk_id]
    first, second = (r.token_ids for r in generator.requests)
    assert second[: len(first) + 2].tolist() == [*first.tolist(), *odd.tolist()]


@pytest.mark.parametrize(
    ("config", "replies", "script", "reason", "num_turns"),
    [
        (replace(CONFIG, max_turns=2), [], ("view",), "max_turns", 2),
        (replace(CONFIG, max_new_tokens=2), [], ("replace 1 a b c",), "max_new_tokens", 1),
        (replace(CONFIG, max_tokens=9), [], ("replace 1 a b c",), "max_tokens", 1),
        (replace(CONFIG, max_tokens=11), ["a a a a a a"], ("view",), "max_tokens", 1),
        (
            replace(CONFIG, max_malformed=2),
            [Observation("bad", malformed=True)] * 3,
            ("a",),
            "max_malformed",
            2,
        ),
    ],
)
def test_limits_end_as_truncated_with_a_name_and_no_reward(
    config: AgentConfig,
    replies: list[Observation],
    script: tuple[str, ...],
    reason: str,
    num_turns: int,
) -> None:
    generator = ScriptedGenerator(says(TOKENIZER, *script))
    cache = RoutingCache(generator.row_layout)
    t = rollout(ScriptedEnv(replies=replies), generator, config=config, cache=cache)
    assert (t.status, t.stop_reason, t.reward) == (Status.TRUNCATED, reason, 0.0)
    assert len(t.turns) == num_turns
    assert len(t.branch.token_ids) <= config.max_tokens
    assert t.branch.loss_mask[-1]  # ends with a sampled token, so only that one has no row
    assert t.branch.routed_experts is not None
    _, present = t.branch.routed_experts.gather(stop=len(t.branch.token_ids) - 1)
    assert present.all()


def test_prompt_longer_than_the_limit_is_truncated_before_sampling() -> None:
    generator = ScriptedGenerator(says(TOKENIZER, "view"))
    t = rollout(ScriptedEnv(), generator, config=replace(CONFIG, max_tokens=4))
    assert (t.status, t.stop_reason, len(t.turns)) == (Status.TRUNCATED, "max_tokens", 0)
    assert generator.requests == []
    assert not t.branch.loss_mask.any()


class StopsByItself(ScriptedGenerator):
    """A server that ends completions at a token of its own, which nobody asked for."""

    async def generate(self, request: GenerateRequest) -> Completion:
        completion = await super().generate(request)
        return replace(completion, finish_reason="stop")


def test_a_turn_that_ends_at_another_token_is_closed_and_the_closing_is_not_trained() -> None:
    foreign = TOKENIZER.encode("view bad")

    def script(request: GenerateRequest, turn: int) -> TokenIds:
        return foreign if turn == 0 else says(TOKENIZER, "submit")(request, turn)

    generator = StopsByItself(script)
    t = rollout(ScriptedEnv(), generator, cache=RoutingCache(generator.row_layout))
    text = TOKENIZER.decode(t.branch.token_ids)
    assert "view bad <end> <obs> ok <end> <assistant> submit <end>" in text
    assert TOKENIZER.decode(t.branch.token_ids[t.branch.loss_mask]) == "view bad submit <end>"
    assert t.branch.routed_experts is not None
    assert t.branch.routed_experts.gather(stop=len(t.branch.token_ids) - 1)[1].all()


@pytest.mark.parametrize("train", [True, False])
def test_malformed_actions_are_trained_or_masked(train: bool) -> None:
    env = ScriptedEnv(replies=[Observation("bad", malformed=True)])
    t = rollout(
        env,
        ScriptedGenerator(says(TOKENIZER, "a", "submit")),
        config=replace(CONFIG, train_malformed=train),
    )
    wanted = "a <end> submit <end>" if train else "submit <end>"
    assert TOKENIZER.decode(t.branch.token_ids[t.branch.loss_mask]) == wanted
    assert "a <end> <obs> bad" in TOKENIZER.decode(t.branch.token_ids)


@pytest.mark.parametrize(
    "env",
    [
        ScriptedEnv(reset_error=InfrastructureError("image pull: 429")),
        ScriptedEnv(replies=[InfrastructureError("daemon timeout")]),
        ScriptedEnv(replies=[OSError("no space left")]),
        ScriptedEnv(replies=["ok"], score=Score(None, "infrastructure", "daemon gone")),
        ScriptedEnv(replies=["ok"], score=InfrastructureError("disk")),
    ],
)
def test_infrastructure_failure_is_a_status_never_a_reward(env: ScriptedEnv) -> None:
    generator = ScriptedGenerator(says(TOKENIZER, "view", "submit"))
    t = rollout(env, generator, cache=RoutingCache(generator.row_layout))
    assert (t.status, t.stop_reason, t.reward) == (Status.FAILED, "infrastructure", None)
    assert t.error
    assert t.branch.routed_experts is None
    assert env.num_closed == 1
    assert generator.open_sessions == set()


class BadRows(ScriptedGenerator):
    """Spoils its replies."""

    def __init__(self, spoil: Callable[[Completion], Completion]) -> None:
        super().__init__(says(TOKENIZER, "view", "submit"))
        self._spoil = spoil

    async def generate(self, request: GenerateRequest) -> Completion:
        return self._spoil(await super().generate(request))


def _rows(completion: Completion) -> np.ndarray:
    assert completion.routed_experts is not None
    return completion.routed_experts


@pytest.mark.parametrize(
    "spoil",
    [
        lambda c: replace(c, routed_experts=None),
        lambda c: replace(c, routed_experts=_rows(c)[:-1]),
        lambda c: replace(c, routed_experts=np.concatenate([_rows(c), _rows(c)[-1:]])),
        lambda c: replace(c, routed_experts=_rows(c)[:, :1]),
        lambda c: replace(c, routed_experts_start=c.routed_experts_start + 1),
        lambda c: replace(c, logprobs=c.logprobs[:-1]),
        lambda c: replace(c, logprobs=c.logprobs * np.nan),
        lambda c: replace(c, finish_reason="abort"),
    ],
    ids=["lost", "short", "padded", "layers", "start", "logprobs", "nan", "abort"],
)
def test_replies_that_do_not_cover_the_tokens_fail_the_trajectory(
    spoil: Callable[[Completion], Completion],
) -> None:
    generator = BadRows(spoil)
    t = rollout(ScriptedEnv(), generator, cache=RoutingCache(generator.row_layout))
    assert (t.status, t.reward) == (Status.FAILED, None)


def test_full_rows_joined_as_if_they_were_suffixes_are_refused() -> None:
    """Prompts of 10, 18, 25 tokens and totals 14, 22, 29: an engine that ignores the start
    returns 13 + 21 + 28 = 62 rows where 28 are wanted."""
    for num_prompt, total, start in ((10, 14, 0), (18, 22, 13), (25, 29, 21)):
        request = GenerateRequest("s", np.zeros(num_prompt, np.int32), SamplingParams(), start)
        num_new = total - num_prompt

        def reply(num_rows: int, n: int = num_new, s: int = start) -> Completion:
            rows = np.zeros((num_rows, 1, 1), np.uint8)
            ids, logprobs = np.zeros(n, np.int32), np.zeros(n, np.float32)
            return Completion(ids, logprobs, "stop", (0,), rows, s)

        check_completion(request, reply(total - 1 - start))
        for wrong in {total - 1, total - 2 - start, total - start} - {total - 1 - start}:
            with pytest.raises(EngineError, match=f"expected {total - 1 - start}"):
                check_completion(request, reply(wrong))


def test_without_a_cache_no_rows_are_asked_for() -> None:
    generator = ScriptedGenerator(says(TOKENIZER, "view", "submit"))
    t = rollout(ScriptedEnv(), generator)
    assert [r.routed_experts_start for r in generator.requests] == [None, None]
    assert t.branch.routed_experts is None


def test_cancelling_waits_for_the_running_step_and_ends_as_aborted() -> None:
    entered, leave = threading.Event(), threading.Event()
    inside: list[str] = []

    class SlowEnv(ScriptedEnv):
        def step(self, action: str) -> Observation:
            inside.append("step")
            entered.set()
            assert leave.wait(10)
            inside.append("left")
            return Observation("ok")

        def close(self) -> None:
            inside.append("close")

    generator = ScriptedGenerator(says(TOKENIZER, "view"))
    cache = RoutingCache(generator.row_layout)

    async def work(executor: ThreadPoolExecutor) -> Trajectory:
        coroutine = run_trajectory(
            SlowEnv(),
            generator,
            cache,
            RENDERER,
            CONFIG,
            group_id="g",
            member=0,
            seed=1,
            executor=executor,
        )
        task = asyncio.create_task(coroutine)
        await asyncio.to_thread(entered.wait, 10)
        task.cancel()
        await asyncio.sleep(0.02)
        leave.set()
        return await task

    t = run(work)
    assert (t.status, t.stop_reason, t.reward) == (Status.ABORTED, "cancelled", None)
    assert inside == ["step", "left", "close"]
    assert generator.open_sessions == set()
    assert cache.stats().num_leases == 0
    assert cache.stats().num_sessions == 0


def test_failing_to_close_keeps_the_verdict() -> None:
    class StuckEnv(ScriptedEnv):
        def close(self) -> None:
            raise RuntimeError("still mounted")

    t = rollout(StuckEnv(), ScriptedGenerator(says(TOKENIZER, "submit")))
    assert (t.status, t.reward) == (Status.COMPLETED, 1.0)
    assert t.error == "while closing: RuntimeError: still mounted"


def test_a_weight_version_is_recorded_for_each_turn() -> None:
    generator = ScriptedGenerator(says(TOKENIZER, "submit"))
    asyncio.run(generator.load_weights({}, 7))
    t = rollout(ScriptedEnv(), generator, cache=RoutingCache(generator.row_layout))
    assert t.weight_versions == (7,)
    assert t.branch.routed_experts is not None
    assert t.branch.routed_experts.weight_versions == (7,)


def test_rows_know_whether_they_were_prefilled_or_decoded() -> None:
    generator = ScriptedGenerator(says(TOKENIZER, "replace 1 a", "submit"))
    t = rollout(ScriptedEnv(), generator, cache=RoutingCache(generator.row_layout))
    assert isinstance(t.branch.routed_experts, RowsLease)
    kinds = np.empty(len(t.branch.token_ids) - 1, dtype="U7")
    for segment in t.branch.routed_experts.segments:
        assert segment.provenance.engine == "scripted"
        kinds[segment.start : segment.stop] = segment.provenance.kind
    for turn in t.turns:  # the last sampled token is fed with the observation behind it
        assert set(kinds[turn.prompt_end : turn.completion_end - 1]) <= {"decode"}
        assert kinds[turn.prompt_end - 1] == "prefill"
        if turn is not t.turns[-1]:
            assert kinds[turn.completion_end - 1] == "prefill"
