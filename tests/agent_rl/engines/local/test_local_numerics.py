"""The engine against a plain transformers forward: log-probs, rows, sampling distribution."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from local_helpers import (
    MakeFolder,
    ask,
    build_model,
    log_softmax,
    play,
    prompt,
    reference,
    with_engine,
)
from transformers.integrations.moe import grouped_mm_experts_forward

from agent_rl.engines.local import LocalEngine
from agent_rl.engines.local.experts import batch_invariant_experts
from agent_rl.engines.local.sampling import counter_uniform, sample
from agent_rl.types import Completion, TokenIds

SHAPES = {
    "plain": {},
    "dense_first": {"mlp_only_layers": [0]},
    "grouped_queries": {"num_key_value_heads": 1},
    "untied_raw_gates": {"tie_word_embeddings": False, "norm_topk_prob": False},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_six_turns_equal_one_full_forward(make_folder: MakeFolder, shape: str) -> None:
    """Rows asked for as suffixes, joined, are the rows of one forward: same ids, same order."""
    changes = SHAPES[shape]
    folder, model = make_folder(**changes), build_model(**changes)

    async def work(engine: LocalEngine) -> tuple[TokenIds, list[Completion]]:
        return await play(engine, "s", seed=3, num_turns=6)

    token_ids, replies = with_engine(folder, work)
    logits, rows = reference(model, token_ids)
    parts = [r.routed_experts for r in replies if r.routed_experts is not None]
    assert sum(map(len, parts)) == len(token_ids) - 1
    assert parts[0].dtype == np.uint8
    np.testing.assert_array_equal(np.concatenate(parts), rows[:-1])

    logprobs = log_softmax(logits)
    position, total_fed = 0, 0
    for i, reply in enumerate(replies):
        position = len(prompt(3)) if i == 0 else position + 3 + i - 1
        places = np.arange(position, position + len(reply.token_ids))
        np.testing.assert_array_equal(token_ids[places], reply.token_ids)
        wanted = logprobs[places - 1, reply.token_ids]
        np.testing.assert_allclose(reply.logprobs, wanted, atol=1e-5, rtol=0)
        total_fed += position - reply.cached_tokens + len(reply.token_ids) - 1
        position += len(reply.token_ids)
    assert total_fed == len(token_ids) - 1  # nothing is computed twice


def test_row_layout_names_moe_layers_by_their_global_number(make_folder: MakeFolder) -> None:
    async def work(engine: LocalEngine) -> LocalEngine:
        return engine

    layout = with_engine(make_folder(mlp_only_layers=[0]), work).row_layout
    assert (layout.num_hidden_layers, layout.moe_layers) == (3, (1, 2))
    assert (layout.num_experts, layout.moe_top_k) == (8, 3)


def test_bfloat16_rows_are_valid_and_use_many_experts(folder: Path) -> None:
    async def work(engine: LocalEngine) -> Completion:
        return await engine.generate(ask("s", prompt(1, 40)))

    rows = with_engine(folder, work, dtype="bfloat16").routed_experts
    assert rows is not None
    assert rows.max() < 8
    assert (np.diff(np.sort(rows, axis=-1), axis=-1) > 0).all()
    assert all(len(np.unique(rows[:, layer])) > 1 for layer in range(3))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_logprobs_are_of_the_sampling_distribution(folder: Path, temperature: float) -> None:
    """With equal weights the ratio trainer / engine is 1 when the trainer divides its logits by
    the temperature too."""

    async def work(engine: LocalEngine) -> Completion:
        request = ask("s", prompt(2), temperature=temperature, max_new_tokens=24, full=True)
        return await engine.generate(request)

    reply = with_engine(folder, work)
    token_ids = np.concatenate([prompt(2), reply.token_ids])
    logits, _ = reference(build_model(), token_ids)
    at = slice(len(prompt(2)) - 1, len(token_ids) - 1)
    wanted = log_softmax(logits, temperature)[at]
    assert reply.full_logprobs is not None
    assert reply.full_logprobs.shape == (len(reply.token_ids), 64)
    np.testing.assert_allclose(reply.full_logprobs, wanted, atol=2e-5, rtol=0)
    ratio = np.exp(wanted[np.arange(len(reply.token_ids)), reply.token_ids] - reply.logprobs)
    np.testing.assert_allclose(ratio, 1, atol=1e-5)


def test_greedy_takes_the_best_token_and_reports_temperature_one(folder: Path) -> None:
    async def work(engine: LocalEngine) -> Completion:
        return await engine.generate(ask("s", prompt(4), temperature=0.0))

    reply = with_engine(folder, work)
    token_ids = np.concatenate([prompt(4), reply.token_ids])
    logprobs = log_softmax(reference(build_model(), token_ids)[0])[len(prompt(4)) - 1 : -1]
    np.testing.assert_array_equal(reply.token_ids, logprobs.argmax(-1))
    np.testing.assert_allclose(reply.logprobs, logprobs.max(-1), atol=1e-5)


def test_known_values_of_the_sampling_distribution() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]] * 3)
    temperatures = torch.tensor([1.0, 0.5, 0.0])
    tokens, logprobs = sample(logits, temperatures, np.array([0.0, 0.0, 0.999]))
    assert tokens.tolist() == [0, 0, 0]
    np.testing.assert_allclose(logprobs[:, 0].numpy(), [-0.4076, -0.1429, -0.4076], atol=1e-4)


def test_draws_follow_the_distribution_and_never_an_impossible_token() -> None:
    logits = torch.tensor([[0.0, 1.0, -torch.inf, 2.0]]).expand(20_000, 4)
    positions = np.arange(20_000)
    uniforms = counter_uniform(np.full(20_000, 9, dtype=np.uint64), positions)
    tokens, logprobs = sample(logits, torch.ones(20_000), uniforms)
    counts = Counter(tokens.tolist())
    assert counts[2] == 0
    for token in (0, 1, 3):
        probability = float(logprobs[0, token].exp())
        spread = 4 * np.sqrt(probability * (1 - probability) / 20_000)
        assert abs(counts[token] / 20_000 - probability) < spread


@pytest.mark.parametrize("edge", [0.0, 1.0 - 2.0**-53])
def test_extreme_uniforms_stay_inside_the_vocabulary(edge: float) -> None:
    tokens, _ = sample(
        torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]]), torch.ones(1), np.array([edge])
    )
    assert tokens.item() in (1, 2)


def test_uniforms_of_neighbouring_seeds_and_positions_are_unrelated() -> None:
    seeds, positions = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200))
    table = counter_uniform(seeds.ravel(), positions.ravel()).reshape(200, 200)
    assert 0 <= table.min() < table.max() < 1
    assert len(np.unique(table)) == table.size
    for other in (table[1:, :], table[:, 1:], table[1:, 1:]):
        same = table[: other.shape[0], : other.shape[1]]
        assert abs(np.corrcoef(same.ravel(), other.ravel())[0, 1]) < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padded_expert_products_equal_the_stock_ones(dtype: torch.dtype) -> None:
    layer = build_model().to(dtype).model.layers[1].mlp
    hidden = torch.randn(50, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    _, weights, chosen = layer.gate(hidden)
    ours = batch_invariant_experts(layer.experts, hidden, chosen, weights)
    stock = grouped_mm_experts_forward(layer.experts, hidden, chosen, weights)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, stock, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)
