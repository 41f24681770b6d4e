"""Replay inside Megatron's routers: exact, keyed by micro-batch and layer, order-free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixture_types import MakePolicy
from reference_policy import gates
from replayed_policy import EXPERTS, TOP_K, Policy, backward, random_table, record, some_ids, table

from agent_rl.trainer.router_replay import RouterReplay

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("process_group")]


@pytest.mark.parametrize(
    "overrides", [{}, {"norm_topk_prob": False}, {"num_hidden_layers": 4, "mlp_only_layers": [0]}]
)
def test_replaying_the_own_choice_changes_no_bit(
    make_policy: MakePolicy, overrides: dict[str, Any]
) -> None:
    policy = Policy(make_policy(**overrides))
    ids = some_ids(3, 20)
    stock = policy.plain(ids)
    stock.logsumexp(-1).sum().backward()
    expected = policy.gradients()
    policy.model.zero_grad()
    live = record(policy, ids)
    with policy.replay.step():
        policy.replay.put(0, table(live))
        replayed = policy.forward(0, ids)
        assert torch.equal(replayed, stock)
        replayed.logsumexp(-1).sum().backward()
    for name, gradient in policy.gradients().items():
        assert torch.equal(gradient, expected[name]), name


def test_order_within_a_set_does_not_matter_beyond_rounding(policy: Path) -> None:
    subject, ids = Policy(policy), some_ids(2, 12)
    live = record(subject, ids)
    with subject.replay.step():
        subject.replay.put(0, table(live.flip(-1)))
        assert torch.allclose(subject.forward(0, ids), subject.plain(ids), atol=1e-5)


@pytest.mark.parametrize("scoring", ["softmax after", "softmax before", "sigmoid and bias"])
def test_gates_follow_the_models_rule_on_the_recorded_set(policy: Path, scoring: str) -> None:
    """The set is borrowed, the weights are the live router's; a selection bias never enters."""
    options = {
        "softmax after": {"moe_router_pre_softmax": False},
        "softmax before": {"moe_router_pre_softmax": True},
        "sigmoid and bias": {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": 2.5,
        },
    }[scoring]
    subject, ids = Policy(policy, **options), some_ids(1, 6)
    router = subject.model.decoder.layers[1].mlp.router
    if scoring == "sigmoid and bias":
        router.expert_bias.copy_(torch.linspace(-3, 3, EXPERTS))
    seen: dict[str, torch.Tensor] = {}
    router.register_forward_hook(lambda module, args, out: seen.update(x=args[0], gates=out[0]))
    chosen = random_table(3, 6, seed=4)
    with subject.replay.step():
        subject.replay.put(0, chosen)
        subject.forward(0, ids)
    scores = seen["x"].flatten(0, 1) @ router.weight.T
    ids_used = chosen.rows[1].long()
    if scoring == "sigmoid and bias":
        inside = torch.zeros_like(scores).scatter(1, ids_used, 1.0)
        expected = scores.sigmoid() * inside
        expected = 2.5 * expected / expected.sum(-1, keepdim=True)
    else:
        expected = gates(scores, ids_used, normalised=scoring == "softmax after")
    assert torch.allclose(seen["gates"], expected, atol=1e-6)
    assert bool(((seen["gates"] > 0).sum(-1) == TOP_K).all())


def test_only_the_recorded_experts_get_a_gradient(policy: Path) -> None:
    subject, ids = Policy(policy), some_ids(1, 8)
    rows = torch.tensor([7, 6, 5, 31]).expand(3, 8, TOP_K)
    with subject.replay.step():
        subject.replay.put(0, table(rows))
        subject.forward(0, ids).logsumexp(-1).sum().backward()
    gradient = subject.gradients()["model.layers.1.mlp.experts.down_proj"]
    touched = gradient.flatten(1).abs().sum(1) > 0
    assert touched.nonzero().flatten().tolist() == [5, 6, 7, 31]
    router = subject.gradients()["model.layers.1.mlp.gate.weight"].abs().sum(1) > 0
    assert router.nonzero().flatten().tolist() == [5, 6, 7, 31]


@pytest.mark.parametrize(
    ("overrides", "layers"),
    [
        ({}, (0, 1, 2)),
        ({"num_hidden_layers": 4, "mlp_only_layers": [0]}, (1, 2, 3)),
        ({"num_hidden_layers": 4, "mlp_only_layers": [1, 3]}, (0, 2)),
    ],
)
def test_rows_reach_their_own_layer_past_dense_ones(
    make_policy: MakePolicy, overrides: dict[str, Any], layers: tuple[int, ...]
) -> None:
    """Every layer gets the experts that its global number names, wherever dense layers sit."""
    subject, ids = Policy(make_policy(**overrides)), some_ids(1, 5)
    assert subject.replay.layers == layers
    assert subject.shape.row_layout.moe_layers == layers
    used: dict[int, set[int]] = {}
    for number, layer in enumerate(subject.model.decoder.layers):
        if hasattr(layer.mlp, "router"):
            layer.mlp.router.register_forward_hook(
                lambda m, a, out, number=number: used.update(
                    {number: set(out[1].nonzero()[:, 1].tolist())}
                )
            )
    named = [torch.arange(TOP_K).expand(5, TOP_K) + TOP_K * layer for layer in layers]
    with subject.replay.step():
        subject.replay.put(0, table(torch.stack(named)))
        subject.forward(0, ids)
    assert used == {layer: set(range(TOP_K * layer, TOP_K * layer + TOP_K)) for layer in layers}


def test_routers_of_a_later_stage_keep_their_global_numbers(policy: Path) -> None:
    """What a second pipeline stage holds: layers numbered from where the first stage ends."""
    subject = Policy(policy)
    for layer in subject.model.decoder.layers:
        layer.mlp.set_layer_number(layer.layer_number + 3)
    later = RouterReplay([subject.model], num_experts=EXPERTS, recompute=False)
    assert later.layers == (3, 4, 5)


ORDERS = [
    ["F0", "B0", "F1", "B1", "F2", "B2"],
    ["F0", "F1", "B0", "F2", "B1", "B2"],
    ["F0", "F1", "F2", "B0", "B1", "B2"],
    ["F0", "F1", "F2", "B2", "B1", "B0"],
    ["F2", "F0", "F1", "B0", "B2", "B1"],
]


@pytest.mark.parametrize("missing", [(), (1, 4)])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_any_order_of_micro_batches_and_recompute(
    policy: Path, recompute: str, missing: tuple[int, ...]
) -> None:
    """Three micro-batches of different lengths, own rows each; one recording, two forwards."""
    batches = [some_ids(2, 6, seed=1), some_ids(1, 11, seed=2), some_ids(3, 4, seed=3)]
    reference: dict[str, torch.Tensor] = {}
    for kind, order in [("none", ORDERS[0]), *((recompute, order) for order in ORDERS)]:
        subject = Policy(policy, recompute=kind)
        subject.model.train()
        with subject.replay.step():
            for i, ids in enumerate(batches):
                subject.replay.put(i, random_table(3, ids.numel(), seed=10 + i, missing=missing))
            with torch.no_grad():
                for i in (2, 0, 1):
                    subject.forward(i, batches[i], count=True)
            losses = {}
            for action in order:
                i = int(action[1])
                if action[0] == "F":
                    losses[i] = subject.forward(i, batches[i]).logsumexp(-1).mean()
                else:
                    backward(losses[i])
        gradients = subject.gradients()
        if not reference:
            reference = gradients
        for name, gradient in gradients.items():
            # Accumulation order over micro-batches is all that may differ.
            assert torch.allclose(gradient, reference[name], rtol=1e-4, atol=1e-6), (order, name)


def test_the_wrong_micro_batch_would_be_noticed(policy: Path) -> None:
    """The order test above can fail: swapping two tables moves the gradient far."""
    results = []
    for seeds in ((10, 11), (11, 10)):
        subject = Policy(policy)
        with subject.replay.step():
            for i, seed in enumerate(seeds):
                subject.replay.put(i, random_table(3, 8, seed=seed))
                subject.forward(i, some_ids(1, 8, seed=i)).logsumexp(-1).mean().backward()
        results.append(subject.gradients()["model.layers.1.mlp.gate.weight"])
    assert float((results[0] - results[1]).norm() / results[0].norm()) > 0.1


def test_a_tie_in_the_live_router_is_kept_through_recompute(policy: Path) -> None:
    """With all scores equal any set is a top-k: the recompute must use the forward's."""
    subject, ids = Policy(policy, recompute="full"), some_ids(1, 6)
    subject.model.train()
    for layer in subject.model.decoder.layers:
        layer.mlp.router.weight.data.zero_()
    used = []
    for layer in subject.model.decoder.layers:
        layer.mlp.router.register_forward_hook(lambda m, a, out: used.append(out[1].clone()))
    with subject.replay.step():
        subject.replay.put(0, random_table(3, 6, seed=0, missing=(0, 2, 5)))
        out = subject.forward(0, ids)
        for layer in subject.model.decoder.layers:  # the live choice would now be another one
            layer.mlp.router.weight.data.normal_()
        backward(out.logsumexp(-1).sum())
    forward, again = used[:3], used[3:]
    assert len(again) == 3
    assert all(torch.equal(a, b) for a, b in zip(forward, reversed(again), strict=True))


@pytest.mark.parametrize("missing", [(3,), (0, 5), tuple(range(6))])
def test_a_missing_row_is_routed_live_and_no_other(policy: Path, missing: tuple[int, ...]) -> None:
    subject, ids = Policy(policy), some_ids(1, 6)
    chosen = random_table(3, 6, seed=9, missing=missing)
    used: list[torch.Tensor] = []
    live: list[torch.Tensor] = []

    def watch(
        router: torch.nn.Module, args: tuple[torch.Tensor, ...], out: tuple[torch.Tensor, ...]
    ) -> None:
        used.append(out[1])
        live.append((args[0].flatten(0, 1) @ router.weight.T).topk(TOP_K).indices)

    for layer in subject.model.decoder.layers:
        layer.mlp.router.register_forward_hook(watch)
    with subject.replay.step():
        subject.replay.put(0, chosen)
        subject.forward(0, ids)
    for slot in range(3):
        for token in range(6):
            expected = live[slot][token] if token in missing else chosen.rows[slot, token]
            got = used[slot][token].nonzero().flatten().tolist()
            assert got == sorted(expected.tolist())


def test_padding_is_spread_and_counted_nowhere(policy: Path) -> None:
    subject, ids = Policy(policy), some_ids(1, 6)
    live = record(subject, ids)
    rows = live.clone()
    rows[:, 4:] = torch.tensor([0, 1, 2, 3])
    rows[1, 0] = (
        (live[1, 0] + 1) % EXPERTS if len(set(live[1, 0].tolist())) == TOP_K else live[1, 0]
    )
    with subject.replay.step():
        subject.replay.put(0, table(rows, pads=(4, 5)))
        subject.forward(0, ids, count=True)
        counts = subject.replay.counts
    assert counts.tokens == 4
    assert counts.load is not None
    assert counts.load.sum(dim=1).tolist() == [4 * TOP_K] * 3
    assert int(counts.flips[0]) == 0
    assert int(counts.flips[1]) == 1
    assert counts.tokens_with_flip >= 1


def test_flips_are_counted_per_layer_against_the_replayed_pass(policy: Path) -> None:
    subject, ids = Policy(policy), some_ids(2, 9)
    chosen = random_table(3, 18, seed=2, missing=(0, 7))
    live: list[torch.Tensor] = []
    for layer in subject.model.decoder.layers:
        layer.mlp.router.register_forward_hook(
            lambda m, args, out: live.append((args[0].flatten(0, 1) @ m.weight.T).topk(4).indices)
        )
    with subject.replay.step():
        subject.replay.put(0, chosen)
        subject.forward(0, ids, count=True)
        counts = subject.replay.counts
    differ = torch.stack(live).sort(-1).values != chosen.rows.long().sort(-1).values
    differ = differ.any(-1) & chosen.present
    assert counts.flips.tolist() == differ.sum(1).tolist()
    assert counts.tokens_with_flip == int(differ.any(0).sum())
    assert counts.tokens == 16


def test_recorded_choice_replays_through_an_update(policy: Path) -> None:
    """R2: the set of the old pass stays while the router's weights move."""
    subject, ids = Policy(policy), some_ids(1, 7)
    used: list[torch.Tensor] = []
    subject.model.decoder.layers[0].mlp.router.register_forward_hook(
        lambda m, args, out: used.append(out[1].clone())
    )
    with subject.replay.step():
        subject.replay.put(0, random_table(3, 7, seed=1, missing=tuple(range(6)), pads=(6,)))
        subject.forward(0, ids, record=True)
        subject.replay.replay_recorded(0)
        subject.model.decoder.layers[0].mlp.router.weight.data.normal_()
        subject.forward(0, ids)
    assert torch.equal(used[0], used[1])
