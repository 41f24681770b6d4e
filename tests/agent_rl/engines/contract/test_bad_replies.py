"""Replies that are lost, mixed up, damaged or late: refused, counted, survived."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx
import numpy as np
import pytest
from fake_sglang import (
    LAYOUT,
    VOCAB_SIZE,
    Answer,
    FakeSGLang,
    Fault,
    change_meta,
    change_rows,
    foreign_id,
    hang_up,
    page_of_a_proxy,
    too_late,
    true_rows,
)
from http_engine_helpers import FAST, ask, assert_true_rows, connect, ids, run

from agent_rl.engines.http.transport import HttpTransport
from agent_rl.errors import (
    EngineError,
    EngineReplyError,
    EngineTimeoutError,
    EngineUnavailableError,
)
from agent_rl.types import GenerateRequest, SamplingParams
from routing_cache import RoutingCache


def test_suffixes_join_and_cost_one_row_more_a_turn() -> None:
    async def scenario() -> None:
        engine = await connect(FakeSGLang())
        prompt, have = ids(10), 0
        for turn in range(5):
            completion = await engine.generate(ask(prompt, start=have))
            assert_true_rows(prompt, completion)
            whole = np.concatenate([prompt, completion.token_ids])
            have = len(whole) - 1
            prompt = np.concatenate([whole, ids(4, turn + 1)])
        assert engine.stats.rows_fetched == have + 4  # every row once, and four seams
        assert engine.stats.seams_checked == 4
        assert engine.stats.bad_replies == 0

    run(scenario)


@pytest.mark.parametrize("by_position", [True, False])
def test_the_turns_of_an_episode_do_not_repeat_each_others_draws(by_position: bool) -> None:
    """A server that starts its stream of draws anew with every request gets a seed a turn."""
    seeds: list[int] = []

    class Listening(FakeSGLang):
        def _answer(self, body: Answer, *, aborted: bool) -> Answer:
            seeds.append(body["sampling_params"].get("sampling_seed"))
            return super()._answer(body, aborted=aborted)

    async def scenario() -> None:
        for _ in range(2):
            engine = await connect(Listening())
            engine.server.seeds_by_position = by_position
            seeds.clear()
            for length in (9, 20, 31):
                sampling = SamplingParams(1.0, 4, seed=7)
                await engine.generate(GenerateRequest("s", ids(length), sampling, None))
            found.append(list(seeds))

    found: list[list[int]] = []
    run(scenario)
    assert found[0] == found[1]
    assert len(set(found[0])) == (1 if by_position else 3)


def foreign(rows: np.ndarray) -> np.ndarray:
    return true_rows(ids(len(rows), seed=99), 0)


BAD_REPLIES: dict[str, tuple[Fault, str]] = {
    "one row too few": (change_rows(lambda rows: rows[:-1]), "byte count"),
    "one row too many": (change_rows(lambda rows: np.concatenate([rows, rows[-1:]])), "byte count"),
    "no rows at all": (change_meta(routed_experts=None), "no routing rows"),
    "rows of zeros": (change_rows(np.zeros_like), "repeated or out-of-range"),
    "an id beyond the experts": (change_rows(lambda rows: rows + 15), "out-of-range"),
    "rows of another request": (change_rows(foreign), "not of this conversation"),
    "another request's reply": (change_meta(id="somebody else"), "mixes up"),
    "another prompt length": (change_meta(prompt_tokens=3), "expected"),
    "log-probs lost": (change_meta(output_token_logprobs=[]), "log-probs"),
    "not base64": (change_meta(routed_experts="?"), "base64"),
    "no finish reason": (change_meta(finish_reason=None), "reply without"),
    "log-probs of nothing": (
        change_meta(output_token_logprobs=[[None, 1, None]]),
        "cannot be read",
    ),
    "no JSON": (page_of_a_proxy, "expected a JSON object; something else than an engine"),
    "an id beyond the vocabulary": (foreign_id, r"expected 0\.\.99"),
}


@pytest.mark.parametrize("what", BAD_REPLIES)
def test_a_bad_reply_is_refused_counted_and_the_next_one_is_right(what: str) -> None:
    fault, message = BAD_REPLIES[what]

    async def scenario() -> None:
        fake = FakeSGLang()
        engine = await connect(fake)
        prompt = ids(12)
        first = await engine.generate(ask(prompt))
        whole = np.concatenate([prompt, first.token_ids, ids(5, 1)])
        fake.faults = [fault]
        with pytest.raises(EngineReplyError, match=message):
            await engine.generate(ask(whole, start=17))
        assert engine.stats.bad_replies == 1
        assert_true_rows(whole, await engine.generate(ask(whole, start=17)))

    run(scenario)


@pytest.mark.parametrize("what", ["no rows at all", "rows of zeros", "an id beyond the experts"])
def test_bad_rows_are_handed_on_where_they_may_be_missing_and_the_seam_stays_honest(
    what: str,
) -> None:
    fault, _ = BAD_REPLIES[what]

    async def scenario() -> None:
        fake = FakeSGLang()
        engine = await connect(fake, refuse_bad_rows=False)
        session = RoutingCache(LAYOUT).session(0)
        prompt, turn = ids(12), 0
        for turn, spoil in enumerate([None, fault, None]):
            fake.faults = [spoil]
            completion = await engine.generate(ask(prompt, start=session.num_rows))
            assert completion.rows_lost == (turn == 1 and what == "no rows at all")
            whole = np.concatenate([prompt, completion.token_ids])
            session.record(
                whole[session.num_tokens :],
                completion.routed_experts,
                start=completion.routed_experts_start,
                weight_version=0,
                num_prefill=len(prompt) - completion.routed_experts_start,
            )
            prompt = np.concatenate([whole, ids(5, turn)])
        rows, present = session.lease().gather(stop=len(whole) - 1)
        np.testing.assert_array_equal(rows[present], true_rows(whole, 0)[:-1, 1:][present])
        # Turn 2 brought rows 17 to 27; only a reply without any is asked for again.
        assert present.all() == (what == "no rows at all")
        assert present[:17].all()
        assert present[28:].all()
        assert engine.stats.bad_replies == 0
        # Damaged, a row can neither be compared nor be what the next turn is compared with.
        assert engine.stats.seams_checked == (1 if what == "no rows at all" else 0)
        for fault_of_number in ("one row too few", "rows of another request"):
            fake.faults = [BAD_REPLIES[fault_of_number][0]]
            with pytest.raises(EngineReplyError):
                await engine.generate(ask(prompt, start=session.num_rows))

    run(scenario)


def test_rows_mixed_up_in_the_first_turn_are_found_in_the_second() -> None:
    async def scenario() -> None:
        fake = FakeSGLang()
        engine = await connect(fake)
        prompt = ids(12)
        fake.faults = [change_rows(foreign)]
        first = await engine.generate(ask(prompt))
        whole = np.concatenate([prompt, first.token_ids, ids(5, 1)])
        with pytest.raises(EngineReplyError, match="not of this conversation"):
            await engine.generate(ask(whole, start=17))
        assert engine.stats.foreign_rows == 1

    run(scenario)


def test_a_flipped_expert_in_a_recomputed_row_is_noise_and_counted() -> None:
    def flip(rows: np.ndarray) -> np.ndarray:
        rows = rows.copy()
        taken = set(rows[0, 1].tolist())
        rows[0, 1, 0] = next(e for e in range(16) if e not in taken)
        return rows

    async def scenario() -> None:
        fake = FakeSGLang()
        engine = await connect(fake)
        prompt = ids(12)
        first = await engine.generate(ask(prompt))
        whole = np.concatenate([prompt, first.token_ids, ids(5, 1)])
        fake.faults = [change_rows(flip)]
        completion = await engine.generate(ask(whole, start=17))
        assert_true_rows(whole, completion)
        assert engine.stats.seams_recomputed == 1

    run(scenario)


def test_a_dropped_connection_is_asked_again_and_a_late_answer_is_not() -> None:
    async def scenario() -> None:
        fake = FakeSGLang()
        engine = await connect(fake)
        fake.faults = [hang_up]
        assert_true_rows(ids(9), await engine.generate(ask(ids(9))))
        assert engine.stats.resends == 1
        assert "/abort_request" in fake.log
        fake.faults = [too_late]
        with pytest.raises(EngineUnavailableError, match="ReadTimeout"):
            await engine.generate(ask(ids(9)))
        assert engine.stats.resends == 1

    run(scenario)


class Line(httpx.AsyncBaseTransport):
    """Answers by turns: a status, or an error to raise."""

    def __init__(self, *answers: int | Exception) -> None:
        self.answers, self.num_asked = answers, 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        answer = self.answers[min(self.num_asked, len(self.answers) - 1)]
        self.num_asked += 1
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(answer, json={})


@pytest.mark.parametrize(
    ("answers", "num_asked", "error"),
    [
        ((httpx.ConnectError("refused"), 503, 429, 200), 4, None),
        ((503,), 4, EngineError),
        ((httpx.ConnectError("refused"),), 4, EngineUnavailableError),
        ((httpx.ReadError("reset"), 200), 1, EngineUnavailableError),
        ((httpx.ReadTimeout("late"), 200), 1, EngineTimeoutError),
        ((500, 200), 1, EngineError),
    ],
)
def test_only_what_never_reached_the_server_is_sent_again(
    answers: tuple[int | Exception, ...], num_asked: int, error: type[EngineError] | None
) -> None:
    line = Line(*answers)

    async def scenario() -> None:
        transport = HttpTransport("http://e", FAST, line)
        if error is None:
            assert (await transport.post("/generate", {})).json_object() == {}
        else:
            with pytest.raises(error, match="http://e/generate"):
                await transport.post("/generate", {})

    run(scenario)
    assert line.num_asked == num_asked


def test_whole_distributions_come_in_token_order_or_are_refused() -> None:
    async def scenario() -> None:
        fake = FakeSGLang()
        engine = await connect(fake)
        request = replace(ask(ids(9)), return_full_logprobs=True)
        completion = await engine.generate(request)
        expected = np.tile(-0.5 * np.arange(VOCAB_SIZE, dtype=np.float32), (6, 1))
        np.testing.assert_array_equal(completion.full_logprobs, expected)
        fake.faults = [change_meta(output_top_logprobs=[[[-1.0, 3, None]]] * 6)]
        with pytest.raises(EngineReplyError, match="all 100 tokens"):
            await engine.generate(request)

    run(scenario)


def test_retractions_are_counted() -> None:
    async def scenario() -> None:
        fake = FakeSGLang()
        engine = await connect(fake)
        fake.faults = [change_meta(num_retractions=2)]
        await engine.generate(ask(ids(9)))
        assert engine.stats.retractions == 2

    run(scenario)


def test_cancelling_aborts_on_the_server() -> None:
    async def scenario() -> None:
        fake = FakeSGLang(latency_s=5.0)
        fake.latency_s = 0.0
        engine = await connect(fake)
        fake.latency_s = 5.0
        call = asyncio.ensure_future(engine.generate(ask(ids(9))))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert fake.log[-1] == "/abort_request"
        assert engine.num_running == 0

    run(scenario)
