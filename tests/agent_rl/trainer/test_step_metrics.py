"""What ranks collect apart adds up to what one process would have collected."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from agent_rl.metrics.mismatch import abs_gap, f_taus, k3
from agent_rl.trainer.batch import MicroBatch, lay_out
from agent_rl.trainer.ingest import Coverage
from agent_rl.trainer.losses import LossInputs, LossOutput
from agent_rl.trainer.optimizer import UpdateReport
from agent_rl.trainer.router_replay import ConsistencySums
from agent_rl.trainer.routing_counts import RoutingCounts
from agent_rl.trainer.step_metrics import StepTotals, add_sums
from agent_rl.types import TrainSample
from routing_cache import RowLayout

LAYOUT = RowLayout(num_hidden_layers=2, moe_layers=(0, 1), num_experts=4, moe_top_k=2)
RNG = np.random.default_rng(0)


def batch_of(length: int) -> MicroBatch:
    ids = np.arange(length, dtype=np.int32)
    sample = TrainSample(
        sample_id="s",
        token_ids=ids,
        loss_mask=ids > 2,
        rollout_logprobs=-RNG.exponential(2.0, length).astype(np.float32),
        advantages=np.ones(length, np.float32),
        weight_versions=(0,),
    )
    return lay_out([sample], [0], index=0, layout=LAYOUT, use_rows=False)


def collect(totals: StepTotals, batch: MicroBatch, seed: int) -> np.ndarray:
    """One micro-batch's old pass and update; returns its old log-probs."""
    torch.manual_seed(seed)
    rollout = batch.rollout_logprobs[batch.loss_mask]
    count = len(rollout)
    old = rollout + 0.5 * torch.randn(count)
    totals.add_old(batch, old, torch.rand(count))
    inputs = LossInputs(
        logprobs=old + 0.1 * torch.randn(count),
        old_logprobs=old,
        rollout_logprobs=rollout,
        advantages=torch.ones(count),
        sequences=torch.zeros(count, dtype=torch.long),
        num_sequences=1,
    )
    clipped = torch.rand(count) < 0.3
    out = LossOutput(torch.rand(count), torch.ones(count), clipped, {"kl": torch.rand(count)})
    totals.add_loss(out.per_token.sum(), torch.tensor(count), inputs, out)
    totals.add_routing(
        RoutingCounts(
            layers=(0, 1),
            flips=torch.tensor([seed, 2]),
            load=torch.tensor([[1, 2, 3, 0], [seed, 1, 1, 1]]),
            tokens=10,
            tokens_with_flip=3,
            flipped=torch.zeros(10, dtype=torch.bool),
        )
    )
    totals.add_consistency(ConsistencySums(torch.rand(2).double(), torch.rand(2).double() + 1))
    return old.numpy()


def test_two_ranks_reduced_are_one_process() -> None:
    batches = [batch_of(12), batch_of(30)]
    whole = StepTotals((0, 1))
    old = [collect(whole, batch, i + 1) for i, batch in enumerate(batches)]
    ranks = [StepTotals((0, 1)), StepTotals((0, 1))]
    for i, (rank, batch) in enumerate(zip(ranks, batches, strict=True)):
        collect(rank, batch, i + 1)
    tokens, routers = add_sums([r.tokens for r in ranks]), add_sums([r.routers for r in ranks])
    maxima = {name: max(r.maxima[name] for r in ranks) for name in ranks[0].maxima}
    ranks[0].reduce(lambda _: tokens, lambda _: routers, lambda _: maxima)
    ours, expected = ranks[0].metrics(), whole.metrics()
    assert ours.keys() == expected.keys()
    assert ours == pytest.approx(expected, rel=1e-12)
    rollout = np.concatenate([b.rollout_logprobs[b.loss_mask].numpy() for b in batches])
    assert expected["kl_k3_rollout_old"] == pytest.approx(k3(rollout, np.concatenate(old)))
    assert expected["abs_logprob_gap"] == pytest.approx(abs_gap(rollout, np.concatenate(old)))
    for name, share in f_taus(rollout, np.concatenate(old)).items():
        assert expected[name] == pytest.approx(share)
    assert expected["router_flip_rate/layer_0"] == pytest.approx(3 / 20)
    assert expected["tokens_with_flip"] == pytest.approx(6 / 20)
    assert expected["experts_idle"] == 1.0


def test_pipeline_stages_bring_their_own_layers() -> None:
    """The first stage has no logits and layer 0, the last one logits and layer 1."""

    def counts(layer: int) -> RoutingCounts:
        return RoutingCounts(
            layers=(layer,),
            flips=torch.tensor([4 + layer]),
            load=torch.ones(1, 4, dtype=torch.long),
            tokens=10,
            tokens_with_flip=7,
            flipped=torch.zeros(10, dtype=torch.bool),
        )

    stages = [StepTotals((0,)), StepTotals((1,))]
    for layer, stage in enumerate(stages):
        stage.add_routing(counts(layer))
    joined = StepTotals((0,))
    routers = add_sums([stage.routers for stage in stages])
    joined.reduce(lambda sums: sums, lambda _: routers, lambda maxima: maxima)
    metrics = joined.metrics()
    assert metrics["router_flip_rate"] == pytest.approx(0.45)
    assert metrics["tokens_with_flip"] == pytest.approx(0.7)


def test_staleness_is_of_a_samples_oldest_token() -> None:
    """Sampled under versions 3 to 5, under 5 alone, and by a policy without a version."""
    ids = np.arange(4, dtype=np.int32)
    values = np.zeros(4, np.float32)
    samples = [
        TrainSample("s", ids, ids > 1, values, values, weight_versions=versions)
        for versions in ((3, 4, 5), (5,), ())
    ]
    totals = StepTotals(())
    totals.add_samples(samples, Coverage(fed=9, fed_replayed=6, trained=6, trained_missing=1), 5)
    metrics = totals.metrics()
    assert metrics["staleness"] == pytest.approx(2 / 3)
    assert metrics["staleness_max"] == 2.0
    assert metrics["replayed_fraction"] == pytest.approx(6 / 9)
    assert metrics["missing_fraction"] == pytest.approx(1 / 6)


def test_load_and_rates_of_several_updates() -> None:
    """Peaks are over a layer's mean, then averaged over layers; the rate is the last update's."""
    totals = StepTotals((0, 1))
    load = torch.tensor([[4, 4, 0, 0], [2, 2, 2, 2]])
    nobody = torch.zeros(0, dtype=torch.bool)
    totals.add_routing(RoutingCounts((0, 1), torch.zeros(2, dtype=torch.int64), load, 0, 0, nobody))
    totals.add_update(UpdateReport(grad_norm=1.0, lr=1e-3))
    totals.add_update(UpdateReport(grad_norm=3.0, lr=5e-4))
    metrics = totals.metrics()
    assert metrics["expert_load_max"] == pytest.approx((2.0 + 1.0) / 2)
    assert metrics["experts_idle"] == 2.0
    assert (metrics["lr"], metrics["grad_norm"], metrics["grad_norm_max"]) == (5e-4, 2.0, 3.0)
    assert "router_flip_rate" not in metrics  # no token had a row


def test_nothing_collected_is_finite_and_says_nothing_of_routers() -> None:
    metrics = StepTotals((0, 1)).metrics()
    assert np.isfinite(list(metrics.values())).all()
    assert metrics["loss"] == 0.0
    assert not [name for name in metrics if "router" in name or "alarm" in name]
