"""Scripts and our own engines as chat models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from eval_fakes import run_blocking

from agent_rl.errors import CapacityError, EngineError
from agent_rl.protocols import Weights
from agent_rl.rollout.episode import Answer
from agent_rl.types import Completion, GenerateRequest, TokenIds
from envs.actions import Prompts
from eval.config import load_suite
from eval.errors import ContextFullError, ModelError
from eval.models import EngineChat, ScriptedChat, load_script
from eval.models.from_config import make_model
from routing_cache import RowLayout


class Bytes:
    """A renderer whose tokens are bytes; 0 ends a completion, 1 and 2 open messages."""

    stop_token_ids = (0,)

    def initial(self, observation: str) -> TokenIds:
        return np.array([1, *observation.encode()], dtype=np.int32)

    def observation(self, text: str) -> TokenIds:
        return np.array([2, *text.encode()], dtype=np.int32)

    def parse(self, completion: TokenIds) -> str:
        return bytes(int(i) for i in completion if i).decode()


class Engine:
    """Answers ``ok`` and keeps the requests."""

    name = "engine"
    weight_version = 0
    row_layout = RowLayout(1, (0,), 4, 2)

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.requests: list[GenerateRequest] = []
        self.ended: list[str] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        ids = np.array([*b"ok", 0][: request.sampling.max_new_tokens], dtype=np.int32)
        reason = "stop" if ids[-1] == 0 else "length"
        return Completion(ids, np.zeros(len(ids), np.float32), reason, (0,))

    async def end_session(self, session_id: str) -> None:
        self.ended.append(session_id)

    async def load_weights(self, weights: Weights, version: int) -> None:
        raise AssertionError("an evaluation loads no weights")

    async def aclose(self) -> None:
        return None


PROMPTS = Prompts("S", "U")


def make(engine: Engine, max_tokens: int = 100, max_new_tokens: int = 8) -> EngineChat:
    return EngineChat(
        engine, Bytes(), name="e", max_tokens=max_tokens, max_new_tokens=max_new_tokens
    )


def test_ids_of_earlier_turns_are_sent_again_as_they_were_sampled() -> None:
    engine = Engine()
    speaker = make(engine).speaker("a/0", PROMPTS)

    async def talk() -> None:
        answer = await speaker.answer("the issue, which the prompts hold")
        assert answer == Answer("ok", prompt_tokens=5, completion_tokens=3)
        await speaker.answer("more")
        await speaker.close()

    run_blocking(talk())
    first, second = (request.token_ids.tolist() for request in engine.requests)
    assert first == [1, *b"S\n\nU"]
    assert second == [*first, *b"ok", 0, 2, *b"more"]
    assert engine.ended == ["a/0"]


def test_a_system_message_is_left_to_a_renderer_that_has_it() -> None:
    engine = Engine()
    model = EngineChat(
        engine, Bytes(), name="e", max_tokens=9, max_new_tokens=8, renders_system=True
    )
    run_blocking(model.speaker("a/0", PROMPTS).answer(""))
    assert engine.requests[0].token_ids.tolist() == [1, *b"U"]


def test_a_reply_that_was_cut_is_closed_before_the_next_message() -> None:
    engine = Engine()
    speaker = make(engine, max_new_tokens=2).speaker("a/0", PROMPTS)

    async def talk() -> None:
        answer = await speaker.answer("")
        assert (answer.cut_by, answer.completion_tokens) == ("max_new_tokens", 2)
        await speaker.answer("more")

    run_blocking(talk())
    assert engine.requests[1].token_ids.tolist() == [1, *b"S\n\nU", *b"ok", 0, 2, *b"more"]


def test_every_sample_of_an_instance_draws_by_itself_and_the_same_in_every_run() -> None:
    def seeds(run_seed: int) -> list[int | None]:
        engine = Engine()
        model = EngineChat(
            engine, Bytes(), name="e", max_tokens=100, max_new_tokens=8, seed=run_seed
        )
        for episode in ("a/0", "a/1", "b/0"):
            run_blocking(model.speaker(episode, PROMPTS).answer(""))
        return [request.sampling.seed for request in engine.requests]

    assert len(set(seeds(0))) == 3
    assert seeds(0) == seeds(0)
    assert not set(seeds(0)) & set(seeds(1))


@pytest.mark.parametrize(
    ("error", "max_tokens", "kind"),
    [
        (None, 2, ContextFullError),
        (CapacityError("no room"), 100, ContextFullError),
        (EngineError("dead"), 100, ModelError),
    ],
)
def test_engine_trouble_has_the_right_name(
    error: Exception | None, max_tokens: int, kind: type[ModelError]
) -> None:
    model = make(Engine(error), max_tokens)
    with pytest.raises(ModelError) as caught:
        run_blocking(model.speaker("a/0", PROMPTS).answer(""))
    assert type(caught.value) is kind


def test_the_policy_that_ships_answers_as_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)  # the suite names a training configuration beside it
    model = make_model(load_suite(root / "configs" / "eval" / "engine_smoke.yaml").model)

    async def talk() -> Answer:
        speaker = model.speaker("a/0", PROMPTS)
        answer = await speaker.answer("")
        await speaker.close()
        await model.aclose()
        return answer

    answer = run_blocking(talk())
    assert answer.text
    assert answer.completion_tokens > 0


def test_scripts_are_by_instance_with_a_default() -> None:
    model = ScriptedChat({"a": ["1", "2"], "*": ["x"]})

    async def talk() -> list[str]:
        keys = ["a/0", "a/1", "a/0", "b/0"]
        return [(await model.reply(key, [])).text for key in keys]

    assert run_blocking(talk()) == ["1", "1", "2", "x"]
    with pytest.raises(ModelError, match=r"script of b is over: got turn 2 of 1"):
        run_blocking(model.reply("b/0", []))


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"a": "text"}', '{"a": [1]}'])
def test_files_that_are_no_scripts_are_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "script.json"
    file.write_text(content)
    with pytest.raises(ModelError, match="no script"):
        load_script(file)
    file.write_text(json.dumps({"a": ["x"]}))
    assert load_script(file) == {"a": ["x"]}
