"""The endpoint client: what it sends, what it retries, what it gives up on."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest
from eval_fakes import run_blocking

from agent_rl.rollout.episode import Answer
from eval.errors import ContextFullError, ModelError
from eval.models import Message, OpenAIChat

MESSAGES = [
    Message("system", "s"),
    Message("user", "u"),
    Message("assistant", "<think>\nhm</think>\n\nact"),
    Message("user", "caf\udce9"),
]
GOOD = {
    "choices": [
        {
            "message": {"content": "text", "reasoning_content": "hm"},
            "finish_reason": "length",
        }
    ],
    "usage": {"prompt_tokens": 7, "completion_tokens": 3},
}
Response = httpx.Response | Exception


class Server:
    """Answers in order; the last one again and again."""

    def __init__(self, *answers: Response) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers[min(len(self.requests), len(self.answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def last_body(self) -> dict[str, object]:
        return json.loads(self.requests[-1].content)


def ask(server: Server, **settings: object) -> Answer:
    async def go() -> Answer:
        model = make(server, **settings)
        try:
            return await model.reply("a/0", MESSAGES)
        finally:
            await model.aclose()

    return run_blocking(go())


def make(server: Callable[[httpx.Request], httpx.Response], **settings: object) -> OpenAIChat:
    merged = {"wait_s": 0.001, "max_retries": 3, **settings}
    transport = httpx.MockTransport(server)
    return OpenAIChat("m", "http://host/v1/", transport=transport, **merged)  # type: ignore[arg-type]


def test_a_request_is_what_the_interface_asks_for() -> None:
    server = Server(httpx.Response(200, json=GOOD))
    reply = ask(server, api_key="secret", temperature=0.5, max_new_tokens=9)
    assert reply == Answer("text", 7, 3, cut_by="max_new_tokens", reasoning="hm")
    request = server.requests[0]
    assert str(request.url) == "http://host/v1/chat/completions"
    assert request.headers["authorization"] == "Bearer secret"
    assert server.last_body == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "act"},  # thinking is not sent again
            {"role": "user", "content": "caf\N{REPLACEMENT CHARACTER}"},
        ],
        "temperature": 0.5,
        "max_tokens": 9,
    }


def test_thinking_can_be_kept() -> None:
    server = Server(httpx.Response(200, json=GOOD))
    ask(server, keep_thinking=True)
    messages = server.last_body["messages"]
    assert isinstance(messages, list)
    assert messages[2]["content"].startswith("<think>")


@pytest.mark.parametrize(
    "trouble",
    [
        httpx.Response(429, headers={"retry-after": "0.01"}),
        httpx.Response(503, headers={"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}),
        httpx.Response(500, text="x" * 10_000),
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("slow"),
        httpx.Response(200, json={"error": "overloaded"}),
        httpx.Response(200, text="<html>"),
        httpx.Response(200, json={"choices": [{"message": {"content": [1]}}]}),
    ],
)
def test_passing_trouble_is_tried_again(trouble: Response) -> None:
    server = Server(trouble, trouble, httpx.Response(200, json=GOOD))
    assert ask(server).text == "text"
    assert len(server.requests) == 3


def test_lasting_trouble_is_an_error_that_says_what_came() -> None:
    server = Server(httpx.Response(503, text="busy"))
    with pytest.raises(ModelError, match=r"no answer in 4 tries: got=503 'busy'"):
        ask(server)
    assert len(server.requests) == 4


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("This model's maximum context length is 32768 tokens", ContextFullError),
        ("context_length_exceeded", ContextFullError),
        ("The input (40000 tokens) is longer than the model's context length", ContextFullError),
        ("unknown parameter: stop", ModelError),
    ],
)
def test_refusals_are_not_tried_again(text: str, kind: type[ModelError]) -> None:
    server = Server(httpx.Response(400, json={"error": {"message": text}}))
    with pytest.raises(ModelError) as caught:
        ask(server)
    assert type(caught.value) is kind
    assert len(server.requests) == 1


def test_an_empty_answer_is_an_answer() -> None:
    empty = {"choices": [{"message": {"content": None}, "finish_reason": "stop"}]}
    assert ask(Server(httpx.Response(200, json=empty))) == Answer("")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (httpx.ConnectError("refused"), "cannot be reached"),
        (httpx.Response(401), "refuses the key"),
    ],
)
def test_the_check_finds_what_would_fail_every_episode(answer: Response, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        run_blocking(make(Server(answer)).check())


def test_the_check_accepts_endpoints_without_a_list_of_models() -> None:
    run_blocking(make(Server(httpx.Response(404))).check())
