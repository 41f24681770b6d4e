"""Consistency terms against numpy, and where in the replay hook they come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agent_rl.config.schema import TrainerConfig
from agent_rl.errors import ReplayError
from agent_rl.model.config_json import read_shape
from agent_rl.model.folders import read_folder
from agent_rl.trainer import cpu_backend
from agent_rl.trainer.losses.router_consistency import (
    live_distribution,
    to_recorded_distributions,
    to_recorded_sets,
)
from agent_rl.trainer.model import build_chunks, transformer_config
from agent_rl.trainer.param_maps import param_maps
from agent_rl.trainer.router_replay import ReplayTable, RouterReplay
from agent_rl.trainer.weights import load_weights

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(50, 8)) * 2
ROWS = np.argsort(RNG.random((50, 8)), axis=1)[:, :3]


def softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x) / np.exp(x).sum(1, keepdims=True)


def test_set_term_value_and_gradient() -> None:
    logits = torch.tensor(LOGITS, requires_grad=True)
    terms = to_recorded_sets(logits.log_softmax(1), torch.from_numpy(ROWS))
    mass = np.take_along_axis(softmax(LOGITS), ROWS, 1).sum(1)
    assert terms.detach().numpy() == pytest.approx(-np.log(mass), rel=1e-10)
    terms.sum().backward()
    inside = np.zeros_like(LOGITS)
    np.put_along_axis(inside, ROWS, 1.0, 1)
    p = softmax(LOGITS)
    assert logits.grad is not None
    # p_e outside the set is pushed down, inside it shares what is missing
    assert logits.grad.numpy() == pytest.approx(p - inside * p / mass[:, None], abs=1e-10)


def test_set_term_is_the_smallest_divergence_of_any_distribution_on_the_set() -> None:
    p = softmax(LOGITS)
    best = np.zeros_like(p)
    np.put_along_axis(best, ROWS, np.take_along_axis(p, ROWS, 1), 1)
    best /= best.sum(1, keepdims=True)
    live = torch.from_numpy(np.log(p))
    with np.errstate(divide="ignore"):
        recorded = torch.from_numpy(np.log(best))
    smallest = to_recorded_distributions(live, recorded)
    assert torch.allclose(to_recorded_sets(live, torch.from_numpy(ROWS)), smallest)
    other = torch.from_numpy(np.log(softmax(RNG.normal(size=p.shape))))
    assert bool((to_recorded_distributions(live, other) > 0).all())
    assert torch.allclose(to_recorded_distributions(live, live), torch.zeros(50).double())


def test_all_experts_recorded_is_no_loss() -> None:
    everything = torch.arange(8).expand(50, 8)
    live = torch.from_numpy(LOGITS).log_softmax(1)
    assert torch.allclose(to_recorded_sets(live, everything), torch.zeros(50).double(), atol=1e-12)


def test_live_distribution_follows_the_scoring_rule_without_its_bias() -> None:
    logits, bias = torch.tensor(LOGITS).float(), torch.linspace(-3, 3, 8)
    expected = logits.log_softmax(1)
    assert torch.allclose(live_distribution(logits, "softmax", None, is_logit=True), expected)
    before = live_distribution(logits.softmax(1), "softmax", None, is_logit=False)
    assert torch.allclose(before, expected, atol=1e-5)
    sigmoid = logits.sigmoid()
    normal = (sigmoid / sigmoid.sum(1, keepdim=True)).log()
    assert torch.allclose(
        live_distribution(sigmoid, "sigmoid", None, is_logit=False), normal, atol=1e-5
    )
    biased = live_distribution(sigmoid + bias, "sigmoid", bias, is_logit=False)
    # Taking the bias off again costs digits of the smallest sigmoids, not of the distribution.
    assert torch.allclose(biased.exp(), normal.exp(), atol=1e-6)


def replayed(folder: Path, weight: float, **options: Any) -> tuple[RouterReplay, torch.nn.Module]:
    shape = read_shape(folder)
    config = transformer_config(shape, TrainerConfig(num_threads=1))
    for name, value in options.items():
        setattr(config, name, value)
    (model,) = build_chunks(shape, config)
    load_weights(param_maps(model, shape), read_folder(folder))
    replay = RouterReplay([model], num_experts=32, recompute=False, consistency_weight=weight)
    return replay, model


def run(
    replay: RouterReplay, model: torch.nn.Module, table: ReplayTable, **options: Any
) -> torch.Tensor:
    ids = torch.randint(0, 200, (1, 6), generator=torch.Generator().manual_seed(0))
    replay.put(0, table)
    with replay.forward(0, **options), cpu_backend.quiet():
        return model(ids, torch.arange(6)[None], None)


def some_table(**fields: Any) -> ReplayTable:
    noise = torch.rand(3, 6, 32, generator=torch.Generator().manual_seed(1))
    nobody = torch.zeros(6, dtype=torch.bool)
    values = {"present": ~nobody, "padding": nobody, "weights": torch.ones(6)} | fields
    return ReplayTable(rows=noise.topk(4).indices.to(torch.uint8), **values)


@pytest.mark.megatron
@pytest.mark.usefixtures("process_group")
def test_only_updates_carry_the_term_and_only_where_weights_are(policy: Path) -> None:
    replay, model = replayed(policy, 0.5)
    with replay.step():
        run(replay, model, some_table(), count=True)
        run(replay, model, some_table(), live=True)
        assert not bool(replay.consistency.weights.any())
        weights = torch.tensor([0.0, 1.0, 0.5, 0.0, 2.0, 1.0])
        present = torch.tensor([True, True, True, True, True, False])
        run(replay, model, some_table(weights=weights, present=present), train=True)
        assert replay.consistency.weights.tolist() == [3.5] * 3  # the missing one counts nothing
        with pytest.raises(ReplayError, match="no token weights"):
            run(replay, model, some_table(weights=None), train=True)
    replay.detach()


@pytest.mark.megatron
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("scoring", ["softmax after", "softmax before", "sigmoid and bias"])
def test_recorded_distributions_equal_to_the_live_ones_cost_nothing(
    policy: Path, scoring: str
) -> None:
    options = {
        "softmax after": {"moe_router_pre_softmax": False},
        "softmax before": {"moe_router_pre_softmax": True},
        "sigmoid and bias": {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
        },
    }[scoring]
    replay, model = replayed(policy, 0.5, **options)
    seen: list[torch.Tensor] = []
    for layer in model.decoder.layers:  # type: ignore[union-attr]
        router = layer.mlp.router
        if router.expert_bias is not None:
            router.expert_bias.copy_(torch.linspace(-1, 1, 32))
        router.register_forward_hook(
            lambda m, args, out: seen.append(args[0].flatten(0, 1) @ m.weight.T)
        )
    with replay.step():
        run(replay, model, some_table(), train=True)
        by_sets = replay.consistency.values.clone()
        scores = torch.stack(seen).detach()
        if scoring == "sigmoid and bias":
            live = (scores.sigmoid() / scores.sigmoid().sum(-1, keepdim=True)).log()
        else:
            live = scores.log_softmax(-1)
        run(replay, model, some_table(distributions=live), train=True)
        by_distributions = replay.consistency.values - by_sets
    assert bool((by_sets > 1.0).all())
    assert by_distributions.abs().max() < 1e-4
    replay.detach()
