"""What every engine must do, as functions of an engine under test. No server knowledge here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from agent_rl.errors import AgentRLError, CapacityError, EngineError
from agent_rl.protocols import Generator
from agent_rl.types import Completion, GenerateRequest, Rows, SamplingParams, TokenIds

FIRST_ID, NUM_IDS = 6, 190  # past the marker tokens
MAX_LOGPROB_GAP = 1e-5
CONTEXT_LENGTH = 512


@dataclass(frozen=True)
class Reference:
    """The same weights in transformers, float32."""

    model: PreTrainedModel

    def forward(self, token_ids: TokenIds, temperature: float = 1.0) -> tuple[Rows, np.ndarray]:
        """Experts ``[T, L, K]`` in the router's order, log-probs ``[T, V]``."""
        with torch.no_grad():
            out = self.model(torch.from_numpy(token_ids)[None].long(), output_router_logits=True)
        top_k = self.model.config.num_experts_per_tok
        experts = [logits.float().topk(top_k, -1).indices.numpy() for logits in out.router_logits]
        logprobs = torch.log_softmax(out.logits[0] / temperature, -1)
        return np.stack(experts, 1).astype(np.uint8), logprobs.numpy()


def load_reference(folder: object) -> Reference:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return Reference(model.eval())


@dataclass(frozen=True)
class UnderTest:
    """An engine and what its rows and log-probs are compared with."""

    engine: Generator
    before: Reference  # its starting weights
    after: Reference  # the weights of the update
    keeps_order: bool  # rows come in the router's order, not only as sets
    block_size: int  # tokens; prefixes are found again in whole blocks

    def check(
        self, prompt: TokenIds, completion: Completion, temperature: float = 1.0, updated: int = 0
    ) -> None:
        """Rows and log-probs of a completion are those of transformers."""
        reference = self.after if updated else self.before
        whole = np.concatenate([prompt, completion.token_ids])
        experts, logprobs = reference.forward(whole, temperature)
        assert completion.routed_experts is not None
        start, stop = completion.routed_experts_start, len(whole) - 1
        self.check_rows(experts[start:stop], completion.routed_experts)
        positions = np.arange(len(prompt) - 1, len(whole) - 1)
        expected = logprobs[positions, completion.token_ids]
        assert np.abs(expected - completion.logprobs).max() <= MAX_LOGPROB_GAP

    def check_rows(self, expected: Rows, got: Rows) -> None:
        assert got.shape == expected.shape
        if self.keeps_order:
            np.testing.assert_array_equal(got, expected)
        np.testing.assert_array_equal(np.sort(got, axis=2), np.sort(expected, axis=2))


def prompt_of(length: int, seed: int = 0) -> TokenIds:
    rng = np.random.default_rng(seed)
    return rng.integers(FIRST_ID, FIRST_ID + NUM_IDS, length, dtype=np.int32)


def ask(
    prompt: TokenIds,
    *,
    session: str = "s",
    new: int = 8,
    temperature: float = 1.0,
    start: int | None = 0,
    stops: tuple[int, ...] = (),
    seed: int | None = None,
) -> GenerateRequest:
    sampling = SamplingParams(temperature, new, stops, seed)
    return GenerateRequest(session, prompt, sampling, start)


async def multi_turn_rows_join_without_gap_or_overlap(test: UnderTest) -> None:
    prompt, have = prompt_of(40), 0
    parts: list[Rows] = []
    for turn in range(4):
        completion = await test.engine.generate(ask(prompt, start=have))
        assert completion.routed_experts_start == have
        test.check(prompt, completion)
        assert completion.routed_experts is not None
        parts.append(completion.routed_experts)
        whole = np.concatenate([prompt, completion.token_ids])
        have = len(whole) - 1
        assert sum(map(len, parts)) == have
        prompt = np.concatenate([whole, prompt_of(10, seed=turn + 1)])
    experts, _ = test.before.forward(prompt[: have + 1])
    test.check_rows(experts[:have], np.concatenate(parts))


async def logprobs_are_of_the_sampling_distribution(test: UnderTest) -> None:
    for temperature in (0.5, 1.0, 1.3):
        prompt = prompt_of(20, seed=int(temperature * 10))
        request = ask(prompt, temperature=temperature, session=f"t{temperature}")
        test.check(prompt, await test.engine.generate(request), temperature)


async def greedy_takes_the_likeliest_token(test: UnderTest) -> None:
    prompt = prompt_of(20, seed=3)
    completion = await test.engine.generate(ask(prompt, temperature=0.0))
    whole = np.concatenate([prompt, completion.token_ids])
    _, logprobs = test.before.forward(whole)
    likeliest = logprobs[len(prompt) - 1 : len(whole) - 1].argmax(-1)
    np.testing.assert_array_equal(completion.token_ids, likeliest)
    expected = logprobs[np.arange(len(prompt) - 1, len(whole) - 1), likeliest]
    assert np.abs(expected - completion.logprobs).max() <= MAX_LOGPROB_GAP


async def next_turn_reuses_the_prefix(test: UnderTest) -> None:
    prompt = prompt_of(70, seed=4)
    first = await test.engine.generate(ask(prompt))
    longer = np.concatenate([prompt, first.token_ids, prompt_of(9, seed=5)])
    second = await test.engine.generate(ask(longer, start=len(prompt) + 7))
    shared = len(prompt) + len(first.token_ids) - 1  # the last sampled token was never fed
    assert second.cached_tokens >= shared - shared % test.block_size
    assert second.cached_tokens <= len(longer)
    test.check(longer, second)


async def siblings_sample_apart_from_one_prompt(test: UnderTest) -> None:
    prompt = prompt_of(40, seed=6)
    requests = [ask(prompt, session=f"n{n}", seed=None) for n in range(4)]
    completions = await asyncio.gather(*(test.engine.generate(r) for r in requests))
    assert len({c.token_ids.tobytes() for c in completions}) == 4
    for completion in completions:
        test.check(prompt, completion)


async def a_stop_token_ends_and_belongs_to_the_completion(test: UnderTest) -> None:
    stops = tuple(range(FIRST_ID, FIRST_ID + NUM_IDS, 2))
    prompt = prompt_of(20, seed=7)
    completion = await test.engine.generate(ask(prompt, new=64, stops=stops))
    assert completion.finish_reason == "stop"
    assert int(completion.token_ids[-1]) in stops
    assert not set(completion.token_ids[:-1].tolist()) & set(stops)
    test.check(prompt, completion)


async def the_length_limit_ends_with_its_reason(test: UnderTest) -> None:
    for new in (1, 5):
        prompt = prompt_of(20, seed=8 + new)
        completion = await test.engine.generate(ask(prompt, new=new, session=f"l{new}"))
        assert completion.finish_reason == "length"
        assert len(completion.token_ids) == new
        test.check(prompt, completion)


async def no_rows_unless_asked(test: UnderTest) -> None:
    completion = await test.engine.generate(ask(prompt_of(20, seed=10), start=None))
    assert completion.routed_experts is None


async def rows_may_begin_at_the_prompts_end(test: UnderTest) -> None:
    prompt = prompt_of(20, seed=11)
    completion = await test.engine.generate(ask(prompt, start=len(prompt)))
    assert completion.routed_experts is not None
    assert len(completion.routed_experts) == len(completion.token_ids) - 1
    test.check(prompt, completion)


async def what_does_not_fit_is_refused_before_it_runs(test: UnderTest) -> None:
    with pytest.raises(CapacityError, match="expected at most"):
        await test.engine.generate(ask(prompt_of(CONTEXT_LENGTH - 4, seed=12), new=8))
    with pytest.raises(EngineError, match="vocabulary"):
        await test.engine.generate(ask(np.array([1, 100_000], np.int32)))
    with pytest.raises(EngineError, match="outside the prompt"):
        await test.engine.generate(ask(prompt_of(5), start=6))
    completion = await test.engine.generate(ask(prompt_of(20, seed=13)))
    test.check(prompt_of(20, seed=13), completion)


async def a_cancelled_request_leaves_a_usable_engine(test: UnderTest) -> None:
    prompt = prompt_of(20, seed=14)
    running = asyncio.ensure_future(test.engine.generate(ask(prompt, new=400, session="gone")))
    await asyncio.sleep(0.2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await test.engine.end_session("gone")
    other = prompt_of(20, seed=15)
    test.check(other, await test.engine.generate(ask(other)))


async def an_update_changes_weights_version_and_cache(test: UnderTest) -> None:
    prompt = prompt_of(70, seed=16)
    old = await test.engine.generate(ask(prompt))
    assert old.weight_versions == (0,)
    assert test.engine.weight_version == 0
    weights = dict(test.after.model.named_parameters())
    await test.engine.load_weights({k: v.detach() for k, v in weights.items()}, 1)
    assert test.engine.weight_version == 1
    new = await test.engine.generate(ask(prompt))
    assert new.weight_versions == (1,)
    assert new.cached_tokens == 0
    test.check(prompt, new, updated=1)
    longer = np.concatenate([prompt, new.token_ids, prompt_of(5, seed=17)])
    test.check(longer, await test.engine.generate(ask(longer, start=70)), updated=1)


async def unknown_sessions_may_be_ended(test: UnderTest) -> None:
    try:
        await test.engine.end_session("never seen")
    except AgentRLError as error:
        raise AssertionError("ending an unknown session must be ignored") from error


Case = Callable[[UnderTest], Awaitable[None]]
CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        multi_turn_rows_join_without_gap_or_overlap,
        logprobs_are_of_the_sampling_distribution,
        greedy_takes_the_likeliest_token,
        next_turn_reuses_the_prefix,
        siblings_sample_apart_from_one_prompt,
        a_stop_token_ends_and_belongs_to_the_completion,
        the_length_limit_ends_with_its_reason,
        no_rows_unless_asked,
        rows_may_begin_at_the_prompts_end,
        what_does_not_fit_is_refused_before_it_runs,
        a_cancelled_request_leaves_a_usable_engine,
        unknown_sessions_may_be_ended,
        an_update_changes_weights_version_and_cache,  # last: a real server keeps the new weights
    )
}
