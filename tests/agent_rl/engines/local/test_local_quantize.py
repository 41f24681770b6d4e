"""Simulated low precision: what is rounded, how, and what is left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from local_helpers import MakeFolder, ask, build_model, prompt, reference, with_engine
from torch.nn import functional as F
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from agent_rl.engines.local import LocalEngine
from agent_rl.engines.local.experts import batch_invariant_experts
from agent_rl.engines.local.hf_model import load_model
from agent_rl.engines.local.quantize import (
    QUANTIZATIONS,
    CoarseRouter,
    QuantizedLinear,
    quantize,
    round_e4m3,
    round_int4,
)
from agent_rl.types import Completion, Floats

SIMULATED = sorted(QUANTIZATIONS)
OF_VALUES = sorted(n for n, q in QUANTIZATIONS.items() if q.weights is not None)
ROUTER_ONLY = "router_int4_simulated"


def _e4m3_grid() -> np.ndarray:
    """Every finite e4m3 value, from its definition: bias 7, 3 mantissa bits, largest 448."""
    normal = [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
    small = [m / 8 * 2.0**-6 for m in range(8)]
    positive = np.array(small + normal)
    assert positive.max() == 448
    return np.concatenate([-positive[::-1], positive])


def test_e4m3_rounds_to_the_nearest_value_of_a_row_scale() -> None:
    values = torch.from_numpy(np.random.default_rng(0).standard_normal((20, 64))).float()
    values[3] *= 1e-4  # rows do not disturb each other
    values[4] = 0.0
    got = round_e4m3(values).numpy()
    scale = np.maximum(np.abs(values.numpy()).max(1, keepdims=True), 1e-12) / 448
    grid = _e4m3_grid()
    scaled = values.numpy() / scale
    nearest = np.abs(scaled[..., None] - grid).min(-1)
    np.testing.assert_allclose(np.abs(scaled - got / scale), nearest, atol=1e-4)
    off_grid = np.abs((got / scale)[..., None] - grid).min(-1)
    assert (off_grid <= 1e-6 * np.abs(scaled) + 1e-6).all()
    assert (got[4] == 0).all()


def test_int4_has_fifteen_steps_a_group() -> None:
    values = torch.from_numpy(np.random.default_rng(1).standard_normal((4, 64))).float()
    rounded = round_int4(values)
    groups, originals = rounded.view(4, 2, 32), values.view(4, 2, 32)
    scale = originals.abs().amax(-1, keepdim=True) / 7
    steps = groups / scale
    torch.testing.assert_close(steps, steps.round(), atol=1e-5, rtol=0)
    assert steps.abs().max() <= 7 + 1e-5
    assert ((groups - originals).abs() <= scale / 2 + 1e-6).all()


def test_a_projection_rounds_input_and_weight() -> None:
    linear = torch.nn.Linear(16, 8, bias=False)
    quantization = QUANTIZATIONS["fp8_simulated"]
    module = QuantizedLinear(linear, quantization)
    module.weight.copy_(round_e4m3(module.weight))
    hidden = torch.randn(5, 16)
    wanted = F.linear(round_e4m3(hidden), round_e4m3(linear.weight.detach()))
    torch.testing.assert_close(module(hidden), wanted)
    with pytest.raises(ValueError, match="bias"):
        QuantizedLinear(torch.nn.Linear(4, 4), quantization)


def test_experts_round_the_input_of_both_products() -> None:
    torch.manual_seed(0)
    experts: Any = build_model().get_submodule("model.layers.0.mlp.experts")
    hidden = torch.randn(7, 32)
    chosen, gates = torch.randint(0, 8, (7, 2)), torch.rand(7, 2)
    got = batch_invariant_experts(experts, hidden, chosen, gates, round_activations=round_e4m3)
    wanted = torch.zeros(7, 32)
    for token, slot in np.ndindex(7, 2):
        expert = int(chosen[token, slot])
        both = F.linear(round_e4m3(hidden[token]), experts.gate_up_proj[expert])
        gate, up = both.chunk(2)
        out = F.linear(round_e4m3(F.silu(gate) * up), experts.down_proj[expert])
        wanted[token] += out * gates[token, slot]
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", OF_VALUES)
def test_router_embedding_and_norms_stay_bfloat16(folder: Path, dtype: str) -> None:
    plain, rounded = load_model(folder, "bfloat16"), load_model(folder, dtype)
    before, after = plain.state_dict(), rounded.state_dict()
    assert before.keys() == after.keys()
    changed = {n for n in before if not torch.equal(before[n].float(), after[n].float())}
    expected = {n for n in before if "_proj" in n}
    assert changed == expected
    inputs: list[torch.Tensor] = []
    router = next(m for m in rounded.modules() if isinstance(m, Qwen3MoeTopKRouter))
    router.register_forward_hook(lambda _m, args, _o: inputs.append(args[0]))
    norm = rounded.get_submodule("model.layers.0.post_attention_layernorm")
    norm.register_forward_hook(lambda _m, _a, output: inputs.append(torch.as_tensor(output)))
    with torch.inference_mode():
        rounded.get_submodule("model.layers.0.mlp")(
            norm(torch.randn(1, 4, 32, dtype=torch.bfloat16))
        )
    assert torch.equal(inputs[0].flatten(), inputs[1].flatten())


def _router(folder: Path, dtype: str, layer: int = 0) -> Any:
    return load_model(folder, dtype).get_submodule(f"model.layers.{layer}.mlp.gate")


def test_a_coarse_router_chooses_by_rounded_weights_and_weighs_by_its_own(folder: Path) -> None:
    """Against a router written out here; choice and gates must come from two sets of weights."""
    router, plain = _router(folder, ROUTER_ONLY), _router(folder, "bfloat16")
    assert isinstance(router, CoarseRouter)
    assert torch.equal(router.weight, plain.weight)
    hidden = torch.randn(200, 32, dtype=torch.bfloat16)
    with torch.inference_mode():
        _, gates, chosen = router(hidden)
        _, _, plain_chosen = plain(hidden)
        probabilities = F.linear(hidden, plain.weight).float().softmax(-1)
    scores = hidden.float() @ round_int4(plain.weight.float()).T
    assert torch.equal(chosen, scores.topk(3, dim=-1).indices)
    kept = probabilities.gather(1, chosen)
    torch.testing.assert_close(
        gates.float(), kept / kept.sum(1, keepdim=True), atol=4e-3, rtol=4e-3
    )
    changed = (chosen.sort(1).values != plain_chosen.sort(1).values).any(1)
    assert 0.02 < changed.float().mean() < 0.5


def test_a_router_that_does_not_renormalise_keeps_the_whole_probability(
    make_folder: MakeFolder,
) -> None:
    router = _router(make_folder(norm_topk_prob=False), ROUTER_ONLY)
    hidden = torch.randn(9, 32, dtype=torch.bfloat16)
    with torch.inference_mode():
        _, gates, chosen = router(hidden)
    wanted = F.linear(hidden, router.weight).float().softmax(-1).gather(1, chosen)
    torch.testing.assert_close(gates.float(), wanted, atol=4e-3, rtol=4e-3)


def test_only_the_choice_differs_from_the_bfloat16_engine(folder: Path) -> None:
    """Same parameters and modules; given the same choice, the same output to the bit."""
    plain, coarse = load_model(folder, "bfloat16"), load_model(folder, ROUTER_ONLY)
    before, after = plain.state_dict(), coarse.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    kinds = [(type(a), type(b)) for a, b in zip(plain.modules(), coarse.modules(), strict=True)]
    assert {pair for pair in kinds if pair[0] is not pair[1]} == {
        (Qwen3MoeTopKRouter, CoarseRouter)
    }
    hidden = torch.randn(1, 64, 32, dtype=torch.bfloat16)
    block, plain_block = (m.get_submodule("model.layers.0.mlp") for m in (coarse, plain))
    with torch.inference_mode():
        chosen, plain_chosen = (b.get_submodule("gate")(hidden)[2] for b in (block, plain_block))
        agreed = torch.equal(chosen, plain_chosen), (chosen == plain_chosen).all(1)
        same = (block(hidden) == plain_block(hidden)).all(-1)[0]
    assert not agreed[0]
    assert bool(same[agreed[1]].all())
    assert not bool(same.all())


def test_the_coarse_choice_is_what_a_completion_reports(folder: Path) -> None:
    """Rows of a completion against one plain forward of transformers with the same routers."""

    async def work(engine: LocalEngine) -> Completion:
        return await engine.generate(ask("s", tokens, max_new_tokens=1))

    tokens = prompt(2, 64)
    captured = with_engine(folder, work, dtype=ROUTER_ONLY).routed_experts
    assert captured is not None
    model = build_model().bfloat16()
    _, plain = reference(model.float(), tokens)
    quantize(model.bfloat16(), QUANTIZATIONS[ROUTER_ONLY])
    _, coarse = reference(model.float(), tokens)
    agreed = [
        float((np.sort(captured) == np.sort(rows)).all(-1).mean()) for rows in (coarse, plain)
    ]
    assert agreed[0] > 0.95  # the rest is bfloat16 against float32
    assert agreed[1] < 0.9


def _distribution(
    folder: Path, dtype: str, weights: dict[str, torch.Tensor] | None = None
) -> Floats:
    async def work(engine: LocalEngine) -> Completion:
        if weights is not None:
            await engine.load_weights(weights, 1)
        return await engine.generate(ask("s", prompt(1, 24), max_new_tokens=1, full=True))

    full = with_engine(folder, work, dtype=dtype).full_logprobs
    assert full is not None
    return full[0]


def test_lower_precision_lies_further_from_float32(folder: Path) -> None:
    exact = _distribution(folder, "float32")
    gaps = [
        float(np.abs(_distribution(folder, dtype) - exact).max())
        for dtype in ("bfloat16", "fp8_simulated", "int4_simulated")
    ]
    assert 0 < gaps[0] < gaps[1] < gaps[2]


@pytest.mark.parametrize("dtype", SIMULATED)
def test_loaded_weights_are_rounded_too(make_folder: MakeFolder, dtype: str) -> None:
    """An engine that is given weights equals one that starts from them."""
    old, new = make_folder(seed=0), make_folder(seed=1)
    weights = build_model(1).state_dict()
    np.testing.assert_array_equal(_distribution(old, dtype, weights), _distribution(new, dtype))
