"""What every engine must do, as functions of an engine under test. No server knowledge here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from agent_rl.errors import AgentRLError, CapacityError, EngineError
from agent_rl.protocols import Generator
from agent_rl.types import Completion, GenerateRequest, Rows, SamplingParams, TokenIds

FIRST_ID, NUM_IDS = 6, 190  # past the marker tokens
MAX_LOGPROB_GAP = 1e-5
MAX_TIE = 1e-5  # between router logits, of order 1, of two experts that count as equal
CONTEXT_LENGTH = 512


class ForcedRouter:
    """A router of transformers that takes the experts it is given; -1 leaves it its own choice.

    Gates come from the live logits of the set, as Qwen3-MoE computes them.
    """

    def __init__(self, gate: torch.nn.Module) -> None:
        self.chosen = torch.zeros(0, 0, dtype=torch.int64)  # [T, K], set before a forward
        self.logits = torch.zeros(0, 0)  # [T, E], left by a forward
        gate.register_forward_hook(self._force)

    def _force(self, gate: Any, args: Any, out: Any) -> tuple[torch.Tensor, ...]:
        self.logits, _, own = out
        chosen = torch.where(self.chosen < 0, own, self.chosen)
        gates = self.logits.float().softmax(-1).gather(1, chosen)
        if gate.norm_topk_prob:
            gates = gates / gates.sum(-1, keepdim=True)
        return self.logits, gates.to(self.logits.dtype), chosen


class Reference:
    """The same weights in transformers, float32, which can be told the experts to use."""

    def __init__(self, folder: Path) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        ).eval()
        gates = [m for name, m in self.model.named_modules() if name.endswith("mlp.gate")]
        self._routers = [ForcedRouter(gate) for gate in gates]
        self.row_shape = (len(gates), self.model.config.num_experts_per_tok)

    def forward(
        self, token_ids: TokenIds, temperature: float = 1.0, chosen: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Router logits ``[T, L, E]`` and log-probs ``[T, V]``.

        Args:
            chosen: Experts ``[T, L, K]`` to use, -1 where the router is to choose.
        """
        if chosen is None:
            chosen = np.full((len(token_ids), *self.row_shape), -1)
        for slot, router in enumerate(self._routers):
            router.chosen = torch.from_numpy(chosen[:, slot].astype(np.int64))
        with torch.no_grad():
            logits = self.model(torch.from_numpy(token_ids)[None].long()).logits[0]
        routers = np.stack([router.logits.float().numpy() for router in self._routers], 1)
        return routers, torch.log_softmax(logits / temperature, -1).numpy()


@dataclass(frozen=True)
class UnderTest:
    """An engine and what its rows and log-probs are compared with.

    Sums in another order decide a tie of two experts in another way, and everything after it
    follows. So the reference is told the engine's experts, each of which must be a choice that the
    reference's own logits allow, to a float32 rounding error.
    """

    engine: Generator
    before: Reference  # its starting weights
    after: Reference  # the weights of the update
    keeps_order: bool  # rows come in the router's order, not only as sets
    block_size: int  # tokens; prefixes are found again in whole blocks
    known: dict[tuple[int, bytes], Rows] = field(default_factory=dict[tuple[int, bytes], Rows])

    def check(
        self, prompt: TokenIds, completion: Completion, temperature: float = 1.0, updated: int = 0
    ) -> None:
        """Rows and log-probs of a completion are those of transformers."""
        whole = np.concatenate([prompt, completion.token_ids])
        got = completion.routed_experts
        assert got is not None
        start, stop = completion.routed_experts_start, len(whole) - 1
        earlier = self.known_rows(whole[:start], updated)
        try:
            self._compare(whole, earlier, completion, temperature, updated)
        except AssertionError:
            if (earlier < 0).all():
                raise
            # A cache that was lost is computed again, in another batch: a tie may fall back.
            own = np.full_like(earlier, -1)
            self._compare(whole, own, completion, temperature, updated)
        for end, row in zip(range(start + 1, stop + 1), got, strict=True):
            self.known[updated, whole[:end].tobytes()] = row

    def known_rows(self, token_ids: TokenIds, updated: int) -> np.ndarray:
        """Rows ``[T, L, K]`` that the engine returned for these tokens before, -1 for unknown."""
        rows = np.full((len(token_ids), *self.before.row_shape), -1)
        for at in range(len(token_ids)):
            row = self.known.get((updated, token_ids[: at + 1].tobytes()))
            if row is not None:
                rows[at] = row
        return rows

    def _compare(
        self,
        whole: TokenIds,
        earlier: np.ndarray,
        completion: Completion,
        temperature: float,
        updated: int,
    ) -> None:
        reference = self.after if updated else self.before
        got = completion.routed_experts
        assert got is not None
        start, stop = completion.routed_experts_start, len(whole) - 1
        assert got.shape == (stop - start, *reference.row_shape)
        last = np.full((1, *reference.row_shape), -1)
        chosen = np.concatenate([earlier, got, last])
        logits, logprobs = reference.forward(whole, temperature, chosen)
        self.check_rows(logits[start:stop], got)
        positions = np.arange(stop - len(completion.token_ids), stop)
        expected = logprobs[positions, completion.token_ids]
        assert np.abs(expected - completion.logprobs).max() <= MAX_LOGPROB_GAP

    def check_rows(self, logits: np.ndarray, got: Rows) -> None:
        """Each row of ``got [T, L, K]`` is the top K of ``logits [T, L, E]``."""
        top_k = got.shape[2]
        ids = np.sort(got, axis=2)
        assert (ids[..., 1:] != ids[..., :-1]).all()
        of_got = np.take_along_axis(logits, got.astype(np.int64), axis=2)
        if not self.keeps_order:
            of_got = -np.sort(-of_got, axis=2)
        best = -np.sort(-logits, axis=2)[..., :top_k]
        np.testing.assert_allclose(of_got, best, rtol=0, atol=MAX_TIE)


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
    joined = np.concatenate(parts)
    logits, _ = test.before.forward(prompt[:have], chosen=joined)
    test.check_rows(logits, joined)


async def logprobs_are_of_the_sampling_distribution(test: UnderTest) -> None:
    for temperature in (0.5, 1.0, 1.3):
        prompt = prompt_of(20, seed=int(temperature * 10))
        request = ask(prompt, temperature=temperature, session=f"t{temperature}")
        test.check(prompt, await test.engine.generate(request), temperature)


async def greedy_takes_the_likeliest_token(test: UnderTest) -> None:
    prompt = prompt_of(20, seed=3)
    completion = await test.engine.generate(ask(prompt, temperature=0.0))
    assert completion.routed_experts is not None
    whole = np.concatenate([prompt, completion.token_ids])
    _, logprobs = test.before.forward(whole[:-1], chosen=completion.routed_experts)
    of_taken = logprobs[np.arange(len(prompt) - 1, len(whole) - 1), completion.token_ids]
    np.testing.assert_allclose(
        of_taken, logprobs[len(prompt) - 1 :].max(-1), rtol=0, atol=MAX_LOGPROB_GAP
    )
    assert np.abs(of_taken - completion.logprobs).max() <= MAX_LOGPROB_GAP


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
