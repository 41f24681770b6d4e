"""Failures on the way from an episode to an advantage, and seams inside a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from bytes_tokenizer import PLAIN, bytes_tokenizer
from rollout_fakes import ScriptedEnv, make_task, run, says, words_tokenizer
from test_template import DROPS_THINKING
from transformers import PreTrainedTokenizerBase

from agent_rl.config.schema import AgentConfig, AlgorithmConfig, RolloutConfig, RunConfig
from agent_rl.engines.scripted import ScriptedGenerator, synthetic_rows
from agent_rl.metrics.rollout_metrics import rollout_metrics
from agent_rl.rollout.agent import run_trajectory
from agent_rl.rollout.chat import CompactRenderer
from agent_rl.rollout.group import GroupCollector
from agent_rl.rollout.samples import build_samples
from agent_rl.rollout.template import ObservationRole, TemplateRenderer, check_template
from agent_rl.types import GenerateRequest, Group, Status, TokenIds, Trajectory
from envs.base import Env, Score, Task
from envs.errors import InfrastructureError
from routing_cache import RoutingCache

WORDS = words_tokenizer()
PULL = InfrastructureError("image pull: 429 too many requests")
NO_TAG = InfrastructureError("image r2e:nowhere does not exist")
LATE = InfrastructureError("the daemon answered after the deadline")
Outcome = float | InfrastructureError
CONFIG = RunConfig(
    algorithm=AlgorithmConfig(advantage="dr_grpo"),
    rollout=RolloutConfig(max_retries=1, retry_wait_s=0.0, max_failure_fraction=0.75),
)


def collect(outcomes: Sequence[Sequence[Outcome]], config: RunConfig = CONFIG) -> list[Group]:
    """One group for each list; a member that fails once fails on every attempt."""
    attempts = 1 + config.rollout.max_retries
    planned = {
        f"t{i}": iter(
            [o for o in members for _ in range(attempts if isinstance(o, Exception) else 1)]
        )
        for i, members in enumerate(outcomes)
    }

    def make_env(task: Task) -> Env:
        # Members run one at a time, so the attempts of one follow each other.
        outcome = next(planned[task.task_id])
        if isinstance(outcome, InfrastructureError):
            return ScriptedEnv(task, reset_error=outcome)
        return ScriptedEnv(task, score=Score(outcome, "graded", "tests"))

    engine = ScriptedGenerator(says(WORDS, "view", "submit"))

    async def work(executor: ThreadPoolExecutor) -> list[Group]:
        collector = GroupCollector(
            generator=engine,
            cache=RoutingCache(engine.row_layout),
            renderer=CompactRenderer(WORDS, 16),
            agent=AgentConfig(max_turns=4, max_tokens=100, max_new_tokens=8),
            rollout=replace(config.rollout, concurrency=1),
            group_size=len(outcomes[0]),
            make_env=make_env,
            executor=executor,
        )
        return await collector([make_task(f"t{i}") for i in range(len(outcomes))], 1)

    return run(work)


@pytest.mark.parametrize("failure", [PULL, NO_TAG, LATE], ids=["429", "no tag", "late"])
def test_a_failed_member_teaches_nothing_and_moves_no_baseline(
    failure: InfrastructureError,
) -> None:
    """Rewards 1, 0, error, 0: as a zero it would make the advantages 3/4 and -1/4."""
    groups = collect([[1.0, 0.0, failure, 0.0]])
    samples = build_samples(groups, CONFIG)
    assert [s.sample_id[-1] for s in samples] == ["0", "1", "3"]
    for sample, wanted in zip(samples, (2 / 3, -1 / 3, -1 / 3), strict=True):
        values = sample.advantages[sample.loss_mask]
        assert values.tolist() == pytest.approx([wanted] * len(values))
        assert sample.routed_experts is not None
        sample.routed_experts.verify(sample.token_ids)
    failed = groups[0].trajectories[2]
    assert (failed.status, failed.reward) == (Status.FAILED, None)
    assert str(failure) in failed.error
    assert rollout_metrics(groups)["reward_mean"] == pytest.approx(1 / 3)


def test_a_group_of_errors_and_one_with_a_single_survivor_are_left_out() -> None:
    groups = collect(
        [[PULL, LATE, PULL, NO_TAG], [1.0, PULL, PULL, PULL], [1.0, 0.0, 1.0, 1.0]],
    )
    assert [len(group.valid) for group in groups] == [0, 1, 4]
    assert {s.sample_id.rsplit("/", 1)[0] for s in build_samples(groups, CONFIG)} == {
        groups[2].group_id
    }


def test_rounding_noise_between_equal_rewards_is_no_signal() -> None:
    groups = collect([[float(np.float32(0.3)), 0.3, 0.1 + 0.2, 0.3]])
    assert len({t.reward for t in groups[0].trajectories}) > 1
    assert build_samples(groups, RunConfig()) == []
    assert rollout_metrics(groups)["groups_with_signal"] == 0.0


def test_episodes_that_are_all_cut_off_have_no_signal() -> None:
    """Four truncated members earn 0 each: nothing to learn, and no division by a spread of 0."""
    engine = ScriptedGenerator(says(WORDS, "view"))

    async def work(executor: ThreadPoolExecutor) -> list[Group]:
        collector = GroupCollector(
            generator=engine,
            cache=None,
            renderer=CompactRenderer(WORDS, 16),
            agent=AgentConfig(max_turns=2, max_tokens=100, max_new_tokens=8),
            rollout=RolloutConfig(),
            group_size=4,
            make_env=ScriptedEnv,
            executor=executor,
        )
        return await collector([make_task()], 1)

    (group,) = run(work)
    assert {t.status for t in group.trajectories} == {Status.TRUNCATED}
    assert build_samples([group], RunConfig()) == []


@pytest.mark.parametrize(
    ("sampled", "observation"),
    [
        (lambda t: t("é")["input_ids"][:1], "\N{REPLACEMENT CHARACTER}é"),
        (lambda t: [*t("a")["input_ids"], *t(" ")["input_ids"]], " b"),
        (lambda t: t.convert_tokens_to_ids(["he", "l"]), "lo"),
    ],
    ids=["half a character", "space against space", "a merge across the seam"],
)
@pytest.mark.parametrize("template", [PLAIN, DROPS_THINKING])
def test_rows_and_ids_stay_in_step_across_an_awkward_seam(
    template: str, sampled: Callable[[PreTrainedTokenizerBase], list[int]], observation: str
) -> None:
    """Joined as text the seam would be tokenised otherwise and rows would no longer fit."""
    tokenizer = bytes_tokenizer(template, [("l", "l"), ("l", "o"), ("h", "e")])
    renderer = TemplateRenderer(tokenizer, 64)
    said = np.array([*sampled(tokenizer), tokenizer.eos_token_id], np.int32)
    last = np.array([*tokenizer("submit")["input_ids"], tokenizer.eos_token_id], np.int32)

    def script(request: GenerateRequest, turn: int) -> TokenIds:
        return said if turn < 2 else last

    engine = ScriptedGenerator(script)
    cache = RoutingCache(engine.row_layout)

    async def work(executor: ThreadPoolExecutor) -> Trajectory:
        return await run_trajectory(
            ScriptedEnv(make_task(issue="fix"), replies=[observation] * 2),
            engine,
            cache,
            renderer,
            AgentConfig(max_tokens=500, max_new_tokens=60),
            group_id="g",
            member=0,
            seed=0,
            executor=executor,
        )

    t = run(work)
    assert t.stop_reason == "submit", t.error
    parts = [renderer.initial("fix"), said, renderer.observation(observation)]
    parts += [said, renderer.observation(observation), last]
    np.testing.assert_array_equal(t.branch.token_ids, np.concatenate(parts))
    assert t.branch.token_ids[t.branch.loss_mask].tolist() == [*said.tolist() * 2, *last.tolist()]
    assert len(t.branch.token_ids) == len(t.branch.loss_mask) == len(t.branch.rollout_logprobs)
    assert t.branch.routed_experts is not None
    t.branch.routed_experts.verify(t.branch.token_ids)
    rows, present = t.branch.routed_experts.gather(stop=len(t.branch.token_ids) - 1)
    assert present.all()
    expected = synthetic_rows(t.branch.token_ids[:-1], engine.row_layout, 0)
    np.testing.assert_array_equal(rows, expected)


# With thinking switched off the template opens each answer with an empty think block, and
# leaves it out again once the answer is history.
THINKING_OFF = PLAIN.replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}",
)


@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_block_that_only_the_newest_answer_has_is_a_rewrite_and_never_in_the_loss(
    role: ObservationRole,
) -> None:
    tokenizer = bytes_tokenizer(THINKING_OFF)
    report = check_template(tokenizer, role)
    assert [text.split(":")[0] for text in report.rewrites] == ["thinking", "no thinking"]
    renderer = TemplateRenderer(tokenizer, 64, observation_role=role)
    said = np.array([*tokenizer("submit")["input_ids"], tokenizer.eos_token_id], np.int32)
    look = np.array([*tokenizer("look")["input_ids"], tokenizer.eos_token_id], np.int32)
    engine = ScriptedGenerator(lambda request, turn: look if turn == 0 else said)

    async def work(executor: ThreadPoolExecutor) -> Trajectory:
        return await run_trajectory(
            ScriptedEnv(make_task(issue="fix"), replies=["ok"]),
            engine,
            None,
            renderer,
            AgentConfig(max_tokens=500, max_new_tokens=60),
            group_id="g",
            member=0,
            seed=0,
            executor=executor,
        )

    t = run(work)
    first, second = (request.token_ids for request in engine.requests)
    np.testing.assert_array_equal(second[: len(first) + len(look)], np.append(first, look))
    trained = tokenizer.decode(
        t.branch.token_ids[t.branch.loss_mask].tolist(), skip_special_tokens=False
    )
    assert trained == "look<|im_end|>submit<|im_end|>"
    whole = tokenizer.decode(t.branch.token_ids.tolist(), skip_special_tokens=False)
    assert isinstance(whole, str)
    assert whole.count("<think>\n\n</think>") == 2
