"""Servers that die, lie, mix up their replies or keep old weights: refused, counted, survived."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from fake_sglang import (
    LAYOUT,
    MODEL,
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

from agent_rl.config.schema import EngineConfig
from agent_rl.engines.balanced import BalancedEngine, BalancedOptions
from agent_rl.engines.http.deployment import Deployment
from agent_rl.engines.http.http_engine import HttpEngine
from agent_rl.engines.http.server_weights import WeightReference
from agent_rl.engines.http.transport import HttpTransport, TransportOptions
from agent_rl.engines.sglang import SGLangServer
from agent_rl.engines.vllm import VLLMServer
from agent_rl.errors import (
    EngineAbortedError,
    EngineError,
    EngineReplyError,
    EngineSetupError,
    EngineTimeoutError,
    EngineUnavailableError,
)
from agent_rl.model.policies import policy_folder
from agent_rl.types import Completion, GenerateRequest, SamplingParams
from routing_cache import RoutingCache

WEIGHTS = {"model.embed_tokens.weight": torch.ones(2, 2)}
FAST = TransportOptions(backoff_s=0.001)
BALANCED = BalancedOptions(revive_every_s=0.01, revive_timeout_s=5.0, min_warm_tokens=16)


async def connect(
    fake: FakeSGLang,
    name: str = "e",
    *,
    reference: WeightReference | None = None,
    work_dir: Path = Path("unused"),
    refuse_bad_rows: bool = True,
    **settings: object,
) -> HttpEngine:
    server = SGLangServer(HttpTransport(f"http://{name}", FAST, fake), MODEL)
    own = {"kind": "sglang", "dtype": "float32", "max_sessions": 64} | settings
    deployment = Deployment(
        EngineConfig(**own),
        policy_folder("builtin:tiny_moe"),
        work_dir,
        refuse_bad_rows=refuse_bad_rows,
        drain_timeout_s=0.5,
    )
    return await HttpEngine.connect(server, MODEL, deployment, name=name, reference=reference)


def ask(
    ids: np.ndarray, session: str = "s", start: int | None = 0, new: int = 6
) -> GenerateRequest:
    return GenerateRequest(session, ids.astype(np.int32), SamplingParams(1.0, new), start)


def ids(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).astype(np.int32)


def assert_true_rows(prompt: np.ndarray, completion: Completion, weights: int = 0) -> None:
    whole = np.concatenate([prompt, completion.token_ids])
    expected = true_rows(whole, weights)[completion.routed_experts_start : -1, 1:]
    np.testing.assert_array_equal(completion.routed_experts, expected)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(scenario())


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


def test_the_folder_of_an_update_that_failed_is_removed_and_the_one_before_stays(
    tmp_path: Path,
) -> None:
    weights = tmp_path / "weights"

    async def scenario() -> None:
        fake = FakeSGLang()
        engine = await connect(fake, work_dir=tmp_path, weight_transfer="disk")
        await engine.load_weights(WEIGHTS, 1)
        assert [path.name for path in weights.iterdir()] == ["e-v1"]
        fake.loads_folders = False
        with pytest.raises(EngineError, match="weight version"):
            await engine.load_weights(WEIGHTS, 2)
        assert [path.name for path in weights.iterdir()] == ["e-v1"]
        fake.loads_folders = True
        await engine.load_weights(WEIGHTS, 3)
        assert [path.name for path in weights.iterdir()] == ["e-v3"]
        await engine.aclose()
        assert list(weights.iterdir()) == []

    run(scenario)


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


def test_a_late_answer_is_not_asked_for_again_by_a_fleet_and_keeps_the_engine_in_service() -> None:
    """It would be drawn again until it is short; every time the engine would be taken away."""

    async def scenario() -> None:
        fake = FakeSGLang()
        fleet = BalancedEngine([await connect(fake)], BALANCED)
        fake.faults = [too_late] * 50
        async with asyncio.timeout(10):
            with pytest.raises(EngineTimeoutError, match="ReadTimeout"):
                await fleet.generate(ask(ids(9)))
        assert (fleet.num_in_service, fleet.stats.engines_lost) == (1, 0)
        fake.faults = []
        assert_true_rows(ids(9), await fleet.generate(ask(ids(9))))
        await fleet.aclose()

    run(scenario)


def test_a_server_that_hangs_leaves_service() -> None:
    def hang(answer: Answer) -> Answer:
        fake.up = False
        return too_late(answer)

    fake = FakeSGLang()

    async def scenario() -> None:
        fleet = BalancedEngine([await connect(fake)], BALANCED)
        fake.faults = [hang]
        with pytest.raises(EngineTimeoutError):
            await fleet.generate(ask(ids(9)))
        assert (fleet.num_in_service, fleet.stats.engines_lost) == (0, 1)
        fake.restart()
        assert_true_rows(ids(9), await fleet.generate(ask(ids(9))))
        await fleet.aclose()

    run(scenario)


class Page(httpx.AsyncBaseTransport):
    """What answers at a mistyped address."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return self._response


@pytest.mark.parametrize("text", ["<html></html>", "[]", '{"vllm_config": 1}', "{}"])
def test_what_is_no_engine_is_told_by_its_address(text: str) -> None:
    async def scenario() -> None:
        wire = Page(httpx.Response(200, text=text))
        for server in (
            SGLangServer(HttpTransport("http://other", FAST, wire), MODEL),
            VLLMServer(HttpTransport("http://other", FAST, wire), MODEL),
        ):
            with pytest.raises(EngineError, match=r"http://other|SGLang names no context length"):
                await server.facts()

    run(scenario)


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


def test_a_server_that_restarted_behind_our_back_is_found_by_its_version() -> None:
    async def scenario() -> None:
        fake = FakeSGLang()
        engine = await connect(fake)
        await engine.load_weights(WEIGHTS, 3)
        fake.restart()
        with pytest.raises(EngineReplyError, match="other weights"):
            await engine.generate(ask(ids(9)))
        with pytest.raises(EngineUnavailableError, match="takes no requests"):
            await engine.generate(ask(ids(9)))
        await engine.recover()
        completion = await engine.generate(ask(ids(9)))
        assert completion.weight_versions == (3,)
        assert_true_rows(ids(9), completion, weights=3)

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


def test_an_update_waits_for_running_requests_then_aborts_them() -> None:
    async def scenario() -> None:
        fake = FakeSGLang()
        engine = await connect(fake)
        fake.latency_s = 0.1
        quick = asyncio.ensure_future(engine.generate(ask(ids(9), "quick")))
        await asyncio.sleep(0.02)
        await engine.load_weights(WEIGHTS, 1)
        assert (await quick).weight_versions == (0,)
        fake.latency_s = 60.0
        slow = asyncio.ensure_future(engine.generate(ask(ids(9), "slow")))
        await asyncio.sleep(0.02)
        fake.latency_s = 0.0
        update = asyncio.ensure_future(engine.load_weights(WEIGHTS, 2))
        await asyncio.sleep(0.05)
        newcomer = asyncio.ensure_future(engine.generate(ask(ids(9), "newcomer")))
        await update
        with pytest.raises(EngineAbortedError):
            await slow
        assert (await newcomer).weight_versions == (2,)

    run(scenario)


def test_a_server_that_does_not_go_on_after_a_pause_leaves_nobody_waiting() -> None:
    async def scenario() -> None:
        fake = FakeSGLang()
        engine = await connect(fake)
        fake.refuse_resume = True
        async with asyncio.timeout(10):
            with pytest.raises(EngineError, match="scheduler is stuck"):
                await engine.load_weights(WEIGHTS, 1)
            with pytest.raises(EngineUnavailableError, match="scheduler is stuck"):
                await engine.generate(ask(ids(9)))
            fake.refuse_resume = False
            await engine.load_weights(WEIGHTS, 2)
            assert_true_rows(ids(9), await engine.generate(ask(ids(9))), weights=2)

    run(scenario)


def test_requests_that_a_pause_does_not_end_are_an_error_of_the_engine() -> None:
    async def scenario() -> None:
        fake = FakeSGLang()
        engine = await connect(fake)
        fake.ignore_pause, fake.latency_s = True, 30.0
        running = asyncio.create_task(engine.generate(ask(ids(9))))
        await asyncio.sleep(0.05)
        with pytest.raises(EngineUnavailableError, match="got 1 requests still running"):
            await engine.load_weights(WEIGHTS, 1)
        running.cancel()
        await asyncio.wait({running})

    run(scenario)


def test_an_update_that_fails_or_does_not_flush_closes_the_engine() -> None:
    async def scenario() -> None:
        fake = FakeSGLang()
        engine = await connect(fake)
        fake.refuse_updates = True
        with pytest.raises(EngineError, match="shape mismatch"):
            await engine.load_weights(WEIGHTS, 1)
        with pytest.raises(EngineUnavailableError, match="version 1 failed"):
            await engine.generate(ask(ids(9)))
        with pytest.raises(EngineUnavailableError, match="version 1 failed"):
            await engine.score(ids(9))
        fake.refuse_updates, fake.keep_cache = False, True
        with pytest.raises(EngineError, match="prefix cache survived"):
            await engine.load_weights(WEIGHTS, 1)
        fake.keep_cache = False
        await engine.load_weights(WEIGHTS, 1)
        assert (await engine.generate(ask(ids(9)))).weight_versions == (1,)

    run(scenario)


class MinusOne:
    """A reference by which every token has log-prob -1, as the stand-in's have."""

    def score(self, weights: object, token_ids: np.ndarray) -> np.ndarray:
        return np.full(len(token_ids) - 1, -1.0, np.float32)


@pytest.mark.parametrize("wrong", [set(), {0}, {0, 1}, {0, 2}, {0, 1, 2}])
def test_one_scored_prompt_may_differ_by_a_tie_and_two_may_not(wrong: set[int]) -> None:
    async def scenario() -> None:
        fake = FakeSGLang(wrong_scores=wrong)
        engine = await connect(fake, reference=MinusOne())
        if len(wrong) < 2:
            await engine.load_weights(WEIGHTS, 1)
            assert (await engine.generate(ask(ids(9)))).weight_versions == (1,)
        else:
            with pytest.raises(EngineError, match=r"did not arrive.*by 5\.00e-01"):
                await engine.load_weights(WEIGHTS, 1)
        assert fake.scored == (3 if wrong else 1)

    run(scenario)


HAZARDS = {
    "enable_hierarchical_cache": True,
    "speculative_algorithm": "EAGLE",
    "disaggregation_mode": "decode",
    "chunked_prefill_size": -1,
    "disable_radix_cache": True,
    "enable_return_routed_experts": False,
}


@pytest.mark.parametrize("flag", HAZARDS)
def test_an_unsafe_server_is_refused_with_what_to_change(flag: str) -> None:
    async def scenario() -> None:
        fake = FakeSGLang(info={flag: HAZARDS[flag]})
        with pytest.raises(EngineSetupError, match=flag.replace("_", "-").removeprefix("enable-")):
            await connect(fake)
        assert "/generate" not in fake.log
        engine = await connect(fake, capture_routing=False)  # without replay it may be used
        assert (await engine.generate(ask(ids(9), start=None))).routed_experts is None

    run(scenario)


PROBE_FAULTS: dict[str, tuple[list[Fault | None], str]] = {
    "the start index is ignored": (
        [None, change_rows(lambda rows: np.concatenate([true_rows(ids(16, 3), 0), rows]))],
        "start index is ignored",
    ),
    "always the same experts": (
        [change_rows(lambda rows: np.broadcast_to([[0, 0], [1, 2], [1, 2]], rows.shape))] * 2,
        "same 2 experts",
    ),
    "a dead head": (
        [change_meta(output_token_logprobs=[[-4.6, 1, None]] * 4)] * 2,
        "output head is dead",
    ),
    "all zeros": ([change_rows(np.zeros_like)] * 2, "repeated or out-of-range"),
}


@pytest.mark.parametrize("what", PROBE_FAULTS)
def test_the_probe_believes_answers_not_flags(what: str) -> None:
    faults, message = PROBE_FAULTS[what]

    async def scenario() -> None:
        with pytest.raises(EngineSetupError, match=message):
            await connect(FakeSGLang(faults=list(faults)))

    run(scenario)


async def fleet_of(*fakes: FakeSGLang) -> BalancedEngine:
    engines = [await connect(fake, f"e{n}") for n, fake in enumerate(fakes)]
    return BalancedEngine(engines, BALANCED)


def test_a_killed_engine_loses_no_trajectory() -> None:
    async def scenario() -> None:
        fakes = [FakeSGLang(), FakeSGLang()]
        fleet = await fleet_of(*fakes)

        async def trajectory(n: int) -> list[Completion]:
            prompt, have, turns = ids(20, seed=n), 0, []
            for turn in range(6):
                if n == 0 and turn == 2:
                    fakes[0].crash()
                if n == 0 and turn == 4:
                    fakes[0].restart()
                completion = await fleet.generate(ask(prompt, f"t{n}", have))
                assert completion.routed_experts_start in (have, 0)
                assert_true_rows(prompt, completion)
                turns.append(completion)
                whole = np.concatenate([prompt, completion.token_ids])
                have = len(whole) - 1
                prompt = np.concatenate([whole, ids(3, 100 * n + turn)])
            return turns

        done = await asyncio.gather(*(trajectory(n) for n in range(8)))
        assert all(len(turns) == 6 for turns in done)
        assert {c.engine for turns in done for c in turns} == {"e0", "e1"}
        assert fleet.stats.moved_sessions >= 1
        assert fleet.stats.engines_lost >= 1
        await asyncio.sleep(0.1)
        assert fleet.num_in_service == 2
        assert fleet.stats.engines_revived >= 1
        assert fleet.metrics()["engine_bad_replies"] == 0
        await fleet.aclose()

    run(scenario)


def test_an_only_engine_that_restarts_is_waited_for_and_gets_its_weights_back() -> None:
    async def scenario() -> None:
        fake = FakeSGLang()
        fleet = await fleet_of(fake)
        await fleet.load_weights(WEIGHTS, 4)
        fake.crash()
        waiting = asyncio.ensure_future(fleet.generate(ask(ids(9))))
        await asyncio.sleep(0.05)
        fake.restart()
        completion = await waiting
        assert completion.weight_versions == (4,)
        assert_true_rows(ids(9), completion, weights=4)
        await fleet.aclose()

    run(scenario)


def test_an_update_reaches_all_engines_or_they_leave_service() -> None:
    async def scenario() -> None:
        fakes = [FakeSGLang(), FakeSGLang()]
        fleet = await fleet_of(*fakes)
        fakes[1].refuse_updates = True
        await fleet.load_weights(WEIGHTS, 1)
        assert fleet.weight_version == 1
        assert fleet.num_in_service == 1
        for n in range(6):
            completion = await fleet.generate(ask(ids(9, n), f"s{n}"))
            assert completion.weight_versions == (1,)
            assert completion.engine == "e0"
        fakes[1].refuse_updates = False
        await asyncio.sleep(0.1)
        assert fleet.num_in_service == 2
        assert fakes[1].version == "1"
        for fake in fakes:
            fake.refuse_updates = True
        with pytest.raises(EngineError, match="no engine took version 2"):
            await fleet.load_weights(WEIGHTS, 2)
        assert fleet.num_in_service == 0
        await fleet.aclose()

    run(scenario)


def test_no_request_is_answered_while_engines_differ() -> None:
    async def scenario() -> None:
        fakes = [FakeSGLang(latency_s=0.0), FakeSGLang(latency_s=0.0)]
        fleet = await fleet_of(*fakes)
        for fake in fakes:
            fake.latency_s = 0.03
        before = [asyncio.ensure_future(fleet.generate(ask(ids(9, n), f"b{n}"))) for n in range(6)]
        await asyncio.sleep(0.005)
        update = asyncio.ensure_future(fleet.load_weights(WEIGHTS, 1))
        await asyncio.sleep(0.005)
        after = [asyncio.ensure_future(fleet.generate(ask(ids(9, n), f"a{n}"))) for n in range(6)]
        await update
        assert {c.weight_versions for c in await asyncio.gather(*before)} == {(0,)}
        assert {c.weight_versions for c in await asyncio.gather(*after)} == {(1,)}
        await fleet.aclose()

    run(scenario)


def test_sessions_stick_and_new_ones_go_where_their_prefix_is_warm() -> None:
    async def scenario() -> None:
        fleet = await fleet_of(FakeSGLang(), FakeSGLang())
        homes = {}
        for n in range(4):
            homes[n] = (await fleet.generate(ask(ids(40, n), f"s{n}"))).engine
        assert set(homes.values()) == {"e0", "e1"}
        for n in range(4):
            sibling = np.concatenate([ids(40, n), ids(3, 50 + n)])
            assert (await fleet.generate(ask(sibling, f"sibling{n}"))).engine == homes[n]
            assert (await fleet.generate(ask(sibling, f"s{n}"))).engine == homes[n]
        assert fleet.stats.warm_placements == 4
        assert fleet.stats.moved_sessions == 0
        await fleet.end_session("s0")
        await fleet.end_session("never seen")
        await fleet.aclose()

    run(scenario)
