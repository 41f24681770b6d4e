"""Simulated low precision: what is rounded, how, and what is left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from local_helpers import MakeFolder, ask, build_model, prompt, with_engine
from torch.nn import functional as F
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from agent_rl.engines.local import LocalEngine
from agent_rl.engines.local.experts import batch_invariant_experts
from agent_rl.engines.local.hf_model import load_model
from agent_rl.engines.local.quantize import (
    QUANTIZATIONS,
    QuantizedLinear,
    round_e4m3,
    round_int4,
)
from agent_rl.types import Completion, Floats

SIMULATED = sorted(QUANTIZATIONS)


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
    module.weight.copy_(quantization.weights(module.weight))
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


@pytest.mark.parametrize("dtype", SIMULATED)
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
