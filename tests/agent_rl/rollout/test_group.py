"""Groups: seeds, retries, exclusion of failures, limits on them, and shared prompt rows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from rollout_fakes import ScriptedEnv, make_task, run, says, words_tokenizer

from agent_rl.config.schema import AgentConfig, RolloutConfig
from agent_rl.engines.scripted import ScriptedGenerator
from agent_rl.errors import ConfigError, RolloutError
from agent_rl.rollout.chat import CompactRenderer
from agent_rl.rollout.group import CollectProgress, GroupCollector, member_seed, retry_wait_s
from agent_rl.types import Completion, GenerateRequest, Group, Status
from envs.base import Env, Observation, Score, Task
from envs.errors import InfrastructureError
from routing_cache import RoutingCache, RowLayout

TOKENIZER = words_tokenizer()
PULL_ERROR = InfrastructureError("image pull: 429 too many requests")
Verdict = float | Exception


class Factory:
    """Environments whose n-th attempt at a member gives the n-th verdict; the last one stays."""

    def __init__(self, verdicts: Sequence[Sequence[Verdict]]) -> None:
        self._verdicts = verdicts
        self.envs: list[ScriptedEnv] = []

    def __call__(self, task: Task) -> Env:
        member = len(self.envs) % len(self._verdicts)
        if len(self.envs) >= len(self._verdicts):  # a retry: the only failing member
            member = next(i for i, v in enumerate(self._verdicts) if len(v) > 1)
        attempts = sum(env.task.issue == str(member) for env in self.envs)
        verdict = self._verdicts[member][min(attempts, len(self._verdicts[member]) - 1)]
        if isinstance(verdict, Exception):
            env = ScriptedEnv(make_task(task.task_id, str(member)), reset_error=verdict)
        else:
            score = Score(verdict, "graded", "tests")
            env = ScriptedEnv(make_task(task.task_id, str(member)), score=score)
        self.envs.append(env)
        return env


def collect(
    make_env: Callable[[Task], Env],
    *,
    tasks: Sequence[Task] = (make_task(),),
    rollout: RolloutConfig | None = None,
    group_size: int = 4,
    generator: ScriptedGenerator | None = None,
    progress: list[CollectProgress] | None = None,
    with_cache: bool = True,
    step: int = 3,
    waits: list[float] | None = None,
) -> list[Group]:
    engine = generator or ScriptedGenerator(says(TOKENIZER, "submit"))
    seen = progress if progress is not None else []

    async def sleep(seconds: float) -> None:
        if waits is not None:
            waits.append(seconds)

    async def work(executor: ThreadPoolExecutor) -> list[Group]:
        collector = GroupCollector(
            generator=engine,
            cache=RoutingCache(engine.row_layout) if with_cache else None,
            renderer=CompactRenderer(TOKENIZER, 16),
            agent=AgentConfig(max_turns=4, max_tokens=100, max_new_tokens=8),
            rollout=rollout or RolloutConfig(),
            group_size=group_size,
            make_env=make_env,
            executor=executor,
            run_seed=5,
            on_progress=seen.append,
            sleep=sleep,
        )
        return await collector(tasks, step)

    return run(work)


def test_a_failed_member_is_retried_then_excluded_not_scored() -> None:
    progress: list[CollectProgress] = []
    factory = Factory([[1.0], [0.0], [PULL_ERROR, PULL_ERROR], [0.0]])
    (group,) = collect(factory, progress=progress)
    assert [t.reward for t in group.trajectories] == [1.0, 0.0, None, 0.0]
    assert [t.reward for t in group.valid] == [1.0, 0.0, 0.0]
    failed = group.trajectories[2]
    assert (failed.status, failed.details["attempts"]) == (Status.FAILED, 3)
    assert "429" in failed.error
    assert progress[-1] == CollectProgress(4, 4, num_failed=1, num_retries=2, num_skipped=0)
    assert all(env.num_closed == 1 for env in factory.envs)


def test_retries_wait_longer_each_time_and_not_all_alike() -> None:
    limits = RolloutConfig(max_retries=4, retry_wait_s=2.0, retry_wait_max_s=10.0)
    waits: list[float] = []
    collect(Factory([[1.0], [0.0], [PULL_ERROR] * 5, [0.0]]), rollout=limits, waits=waits)
    assert len(waits) == 4
    for wait, whole in zip(waits, (2.0, 4.0, 8.0, 10.0), strict=True):
        assert whole / 2 <= wait <= whole
    others = {retry_wait_s(limits, seed, 1) for seed in range(8)}
    assert len(others) == 8
    assert retry_wait_s(replace(limits, retry_wait_s=0.0), 1, 3) == 0.0
    assert retry_wait_s(limits, 7, 2) == retry_wait_s(limits, 7, 2)


def test_without_failures_nobody_waits() -> None:
    waits: list[float] = []
    collect(Factory([[1.0], [0.0], [0.0], [0.0]]), waits=waits)
    assert waits == []


def test_a_retry_that_works_counts_as_its_member() -> None:
    (group,) = collect(Factory([[1.0], [0.0], [PULL_ERROR, 1.0], [0.0]]))
    assert [t.reward for t in group.trajectories] == [1.0, 0.0, 1.0, 0.0]
    assert [t.member for t in group.trajectories] == [0, 1, 2, 3]
    assert group.trajectories[2].details["attempts"] == 2


def test_a_group_of_errors_is_reported_as_skipped() -> None:
    progress: list[CollectProgress] = []
    tasks = [make_task("good"), make_task("broken")]

    def make_env(task: Task) -> Env:
        error = PULL_ERROR if task.task_id == "broken" else None
        return ScriptedEnv(task, reset_error=error)

    limits = RolloutConfig(max_failure_fraction=0.5)
    groups = collect(make_env, tasks=tasks, rollout=limits, progress=progress)
    assert [len(g.valid) for g in groups] == [4, 0]
    assert [g.task_id for g in groups] == ["good", "broken"]
    assert progress[-1].num_skipped == 1


def test_too_many_failures_stop_the_step_and_give_everything_back() -> None:
    engine = ScriptedGenerator(says(TOKENIZER, "submit"))
    envs: list[ScriptedEnv] = []

    def make_env(task: Task) -> Env:
        envs.append(ScriptedEnv(task, reset_error=PULL_ERROR))
        return envs[-1]

    with pytest.raises(RolloutError, match=r"2 of 4 after 1 retries.*0\.25.*429"):
        collect(make_env, generator=engine, rollout=RolloutConfig(max_retries=1))
    assert all(env.num_closed == 1 for env in envs)
    assert engine.open_sessions == set()


def test_exactly_the_allowed_fraction_may_fail() -> None:
    factory = Factory([[1.0], [0.0], [PULL_ERROR, PULL_ERROR], [0.0]])
    (group,) = collect(factory, rollout=RolloutConfig(max_failure_fraction=0.25))
    assert len(group.valid) == 3


class CountingGenerator(ScriptedGenerator):
    """Notes how many requests run at once, and yields to the loop while one does."""

    def __init__(self) -> None:
        super().__init__(says(TOKENIZER, "view", "submit"))
        self.running = self.most = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.005)
        self.running -= 1
        return await super().generate(request)


def test_concurrency_is_bounded() -> None:
    engine = CountingGenerator()
    tasks = [make_task(f"t{i}") for i in range(4)]
    collect(ScriptedEnv, tasks=tasks, generator=engine, rollout=RolloutConfig(concurrency=3))
    assert engine.most == 3


def test_seeds_depend_on_run_step_task_and_member_only() -> None:
    def seeds(step: int) -> dict[str, int | None]:
        engine = ScriptedGenerator(says(TOKENIZER, "submit"))
        tasks = [make_task("a"), make_task("b"), make_task("a")]
        collect(ScriptedEnv, tasks=tasks, generator=engine, step=step)
        return {r.session_id: r.sampling.seed for r in engine.requests}

    first = seeds(3)
    assert first == seeds(3)
    assert len(set(first.values())) == len(first) == 12  # a repeated task gets other seeds too
    assert not set(first.values()) & set(seeds(4).values())
    assert first["step3/group0/0/0"] == member_seed(5, 3, "a", 0, 0)
    assert all(0 <= s < 2**63 for s in first.values() if s is not None)


def test_a_retry_keeps_the_members_seed_in_a_session_of_its_own() -> None:
    engine = ScriptedGenerator(says(TOKENIZER, "view", "submit"))
    envs = iter([[InfrastructureError("exec: timeout")], []])

    def make_env(task: Task) -> Env:
        return ScriptedEnv(task, replies=next(envs))

    collect(make_env, generator=engine, group_size=1)
    by_session = {r.session_id: r.sampling.seed for r in engine.requests}
    assert len(by_session) == 2
    assert len(set(by_session.values())) == 1


class GatedGenerator(ScriptedGenerator):
    """Answers nobody before ``num_members`` have asked, so that all of them start together."""

    def __init__(self, num_members: int) -> None:
        super().__init__(says(TOKENIZER, "view", "submit"))
        self.num_awaited = num_members
        self.everyone_asked = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> Completion:
        self.num_awaited -= 1
        if self.num_awaited <= 0:
            self.everyone_asked.set()
        await self.everyone_asked.wait()
        return await super().generate(request)


def test_members_that_start_together_overlap_on_the_prompt_without_disagreement() -> None:
    engine = GatedGenerator(8)
    cache = RoutingCache(engine.row_layout)

    async def work(executor: ThreadPoolExecutor) -> list[Group]:
        collector = GroupCollector(
            engine,
            cache,
            CompactRenderer(TOKENIZER, 16),
            AgentConfig(max_tokens=100),
            RolloutConfig(),
            8,
            lambda task: ScriptedEnv(task),
            executor,
        )
        return await collector([make_task(issue="fix a b c")], 0)

    (group,) = run(work)
    assert {r.routed_experts_start for r in engine.requests[:8]} == {0}
    disagreements = cache.stats().disagreements
    assert disagreements.compared >= 7 * group.trajectories[0].turns[0].prompt_end
    assert disagreements.differing == 0
    rows = [
        t.branch.routed_experts.gather()[0] for t in group.trajectories if t.branch.routed_experts
    ]
    assert len(rows) == 8
    for other in rows[1:]:
        np.testing.assert_array_equal(other, rows[0])


def test_a_member_that_starts_later_reuses_the_prompts_rows() -> None:
    engine = ScriptedGenerator(says(TOKENIZER, "submit"))
    (group,) = collect(ScriptedEnv, generator=engine, rollout=RolloutConfig(concurrency=1))
    num_prompt = group.trajectories[0].turns[0].prompt_end
    assert [r.routed_experts_start for r in engine.requests] == [0] + [num_prompt] * 3


def test_cache_and_engine_must_agree_on_the_rows() -> None:
    other = RowLayout(num_hidden_layers=3, moe_layers=(1, 2), num_experts=8, moe_top_k=2)
    with ThreadPoolExecutor(1) as executor, pytest.raises(ConfigError, match="disagree"):
        GroupCollector(
            ScriptedGenerator(says(TOKENIZER, "submit")),
            RoutingCache(other),
            CompactRenderer(TOKENIZER, 16),
            AgentConfig(),
            RolloutConfig(),
            2,
            lambda task: ScriptedEnv(task),
            executor,
        )


def test_cancelling_a_collection_releases_what_it_holds() -> None:
    engine = CountingGenerator()
    cache = RoutingCache(engine.row_layout)
    envs: list[ScriptedEnv] = []

    class Endless(ScriptedEnv):
        def step(self, action: str) -> Observation:
            return Observation("ok")

    def make_env(task: Task) -> Env:  # the first member finishes and holds a lease
        envs.append(Endless(task) if envs else ScriptedEnv(task))
        return envs[-1]

    async def work(executor: ThreadPoolExecutor) -> None:
        collector = GroupCollector(
            engine,
            cache,
            CompactRenderer(TOKENIZER, 16),
            AgentConfig(max_turns=10_000, max_tokens=100_000),
            RolloutConfig(),
            4,
            make_env,
            executor,
        )
        task = asyncio.create_task(collector([make_task()], 0))
        await asyncio.sleep(0.15)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(work)
    assert [env.num_closed for env in envs] == [1] * 4
    assert engine.open_sessions == set()
    assert (cache.stats().num_leases, cache.stats().num_sessions) == (0, 0)
