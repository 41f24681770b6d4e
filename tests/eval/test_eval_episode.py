"""One episode with a scripted model: limits, malformed calls, failures, what is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from eval_fakes import FakeEnv, run_blocking

from agent_rl.rollout.episode import Answer
from agent_rl.view.record import EpisodeRecord
from envs.actions import Prompts
from envs.errors import InfrastructureError
from eval.config import AgentLoopConfig
from eval.episode import play_episode
from eval.errors import ContextFullError, ModelError
from eval.models import Message, Model, OpenAIChat, ScriptedChat

PROMPTS = Prompts("system", "user")


def play(
    env: FakeEnv, replies: Sequence[str], limits: AgentLoopConfig | None = None
) -> EpisodeRecord:
    return run_blocking(_play(env, ScriptedChat({"*": replies}), limits))


async def _play(env: FakeEnv, model: Model, limits: AgentLoopConfig | None = None) -> EpisodeRecord:
    with ThreadPoolExecutor(1) as executor:
        return await play_episode(
            lambda: env,
            model,
            PROMPTS,
            limits or AgentLoopConfig(),
            instance_id="a",
            sample=0,
            executor=executor,
        )


def test_an_episode_is_recorded_from_prompt_to_patch() -> None:
    env = FakeEnv(patch=b"+x")
    record = play(env, ["look", "edit", "submit"])
    assert (record.status, record.stop_reason) == ("completed", "submit")
    assert [(turn.action, turn.observation) for turn in record.turns] == [
        ("look", "did look"),
        ("edit", "did edit"),
        ("submit", "submitted"),
    ]
    assert record.patch == "+x\n"
    assert (record.system_prompt, record.user_prompt) == ("system", "user")
    assert record.turns[1].prompt_tokens > record.turns[0].prompt_tokens > 0
    assert env.closed


@pytest.mark.parametrize(
    ("limits", "reason", "num_turns"),
    [
        (AgentLoopConfig(max_turns=2), "max_turns", 2),
        (AgentLoopConfig(max_completion_tokens=3), "max_completion_tokens", 3),
        (AgentLoopConfig(max_seconds=1e-9), "max_seconds", 0),
        (AgentLoopConfig(max_malformed=2), "malformed", 4),
    ],
)
def test_limits_end_an_episode_with_a_name(
    limits: AgentLoopConfig, reason: str, num_turns: int
) -> None:
    env = FakeEnv(patch=b"+x\n")
    record = play(env, ["bad", "look", "bad", "bad", "look", "submit"], limits)
    assert (record.status, record.stop_reason) == ("truncated", reason)
    assert len(record.turns) == num_turns
    assert record.patch == "+x\n"
    kept_back = AgentLoopConfig(max_turns=1, patch_at_limit=False)
    assert play(FakeEnv(patch=b"+x\n"), ["look"], kept_back).patch == ""


@pytest.mark.parametrize("where", ["make", "reset", "step", "patch"])
def test_a_broken_environment_is_a_failure_not_an_answer(where: str) -> None:
    env = FakeEnv(patch=b"+x\n", fails_in=where)
    with ThreadPoolExecutor(1) as executor:

        def make() -> FakeEnv:
            env.fail_if("make")
            return env

        record = run_blocking(
            play_episode(
                make,
                ScriptedChat({"*": ["look", "submit"]}),
                PROMPTS,
                AgentLoopConfig(),
                instance_id="a",
                sample=0,
                executor=executor,
            )
        )
    assert (record.status, record.stop_reason, record.patch) == ("failed", "infrastructure", "")
    assert record.error == f"InfrastructureError: {where} is broken"
    assert env.closed == (where != "make")


def test_trouble_while_closing_changes_no_verdict() -> None:
    record = play(FakeEnv(patch=b"+x\n", fails_in="close"), ["submit"])
    assert (record.status, record.patch) == ("completed", "+x\n")
    assert record.error.startswith("while closing")


class NeverEnds(ScriptedChat):
    async def end_episode(self, episode: str) -> None:
        raise ModelError("the engine is gone")


def test_a_model_that_cannot_end_an_episode_keeps_no_container() -> None:
    env = FakeEnv(patch=b"+x\n")
    record = run_blocking(_play(env, NeverEnds({"*": ["submit"]})))
    assert (record.status, record.patch) == ("completed", "+x\n")
    assert "the engine is gone" in record.error
    assert env.closed


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(503, ("failed", "infrastructure", "")), (200, ("truncated", "max_seconds", "+x\n"))],
)
def test_a_time_limit_is_the_models_only_where_the_endpoint_answers(
    status: int, outcome: tuple[str, str, str]
) -> None:
    """Failed tries up to the limit are infrastructure; one answer that takes long is not."""

    async def endpoint(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(60 if status == 200 else 0)
        return httpx.Response(status, text="overloaded")

    async def go() -> EpisodeRecord:
        model = OpenAIChat(
            "m", "http://host/v1", wait_s=0.01, transport=httpx.MockTransport(endpoint)
        )
        try:
            return await _play(FakeEnv(patch=b"+x\n"), model, AgentLoopConfig(max_seconds=0.3))
        finally:
            await model.aclose()

    record = run_blocking(go())
    assert (record.status, record.stop_reason, record.patch) == outcome
    assert ("503 'overloaded'" in record.error) == (status == 503)


class FullModel(ScriptedChat):
    def __init__(self, error: Exception) -> None:
        super().__init__({"*": ["look"]})
        self.error = error
        self.seen: list[list[Message]] = []

    async def reply(self, episode: str, messages: Sequence[Message]) -> Answer:
        self.seen.append(list(messages))
        if len(messages) > 2:
            raise self.error
        return Answer("look", cut_by="max_new_tokens")


def test_a_full_context_hands_in_what_there_is() -> None:
    model = FullModel(ContextFullError("full"))
    record = run_blocking(_play(FakeEnv(patch=b"+x\n"), model))
    assert (record.status, record.stop_reason) == ("truncated", "context_full")
    assert record.patch == "+x\n"
    assert [message.role for message in model.seen[1]] == ["system", "user", "assistant", "user"]
    assert model.seen[1][-1].content.startswith("Your last message was cut off")


def test_an_endpoint_that_fails_for_good_is_a_failure() -> None:
    record = run_blocking(_play(FakeEnv(), FullModel(ModelError("502"))))
    assert (record.status, record.error) == ("failed", "ModelError: 502")


def test_cancelling_waits_for_the_environment_and_closes_it() -> None:
    env = FakeEnv(seconds=0.2)

    async def cancel() -> None:
        task = asyncio.create_task(_play(env, ScriptedChat({"*": ["look"] * 50})))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert env.closed
    assert not env.busy


def test_the_kind_of_error_is_kept() -> None:
    assert issubclass(ContextFullError, ModelError)
    assert not issubclass(InfrastructureError, ModelError)
