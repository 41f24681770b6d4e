"""The whole step: values, gradients, metrics and replay modes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixture_types import MakePolicy, MakeSamples, MakeTrainer
from reference_policy import logits as reference_logits
from trainer_samples import LENGTHS, with_rollout, without_rows

from agent_rl.metrics.mismatch import abs_gap, exact_kl, f_taus, k3
from agent_rl.model.config_json import read_shape
from agent_rl.model.folders import read_folder
from agent_rl.trainer.weights import export_like
from agent_rl.types import TrainSample

pytestmark = pytest.mark.megatron


def reference(
    folder: Path, samples: list[TrainSample], temperature: float = 1.0
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Float64 log-probs of the sampled tokens by sample, and the weights that carry gradients."""
    shape = read_shape(folder)
    weights = {n: t.double().requires_grad_() for n, t in read_folder(folder).items()}
    values = []
    for sample in samples:
        count = len(sample.token_ids) - 1
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))
        if not count:
            values.append(torch.zeros(0, dtype=torch.float64))
            continue
        rows = None
        if sample.routed_experts is not None:
            rows = torch.from_numpy(sample.routed_experts.gather(stop=count)[0].astype(np.int64))
        out = reference_logits(weights, shape, ids[:-1], rows) / temperature
        picked = out.log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
        values.append(picked[torch.from_numpy(sample.loss_mask[1:])])
    return values, weights


@pytest.mark.parametrize("variant", [{}, {"norm_topk_prob": False, "mlp_only_layers": [1]}])
@pytest.mark.parametrize("reduction", ["token", "sequence"])
def test_gradient_of_a_replayed_step_equals_the_float64_reference(
    make_policy: MakePolicy,
    make_samples: MakeSamples,
    make_trainer: MakeTrainer,
    variant: dict[str, Any],
    reduction: str,
) -> None:
    """Several padded micro-batches, gradient accumulation, clipping bounds, replay: all at once."""
    folder = make_policy(**variant)
    samples = make_samples(LENGTHS, folder=folder)
    trainer = make_trainer(
        folder,
        optim={"lr": 0.0, "clip_grad": 0.0},
        algorithm={"loss_reduction": reduction},
        trainer={"micro_batch_tokens": 64},
    )
    metrics = trainer.step(samples)
    values, weights = reference(folder, samples)
    total, units = torch.zeros((), dtype=torch.float64), 0
    for sample, value in zip(samples, values, strict=True):
        if not len(value):
            continue
        advantage = torch.from_numpy(sample.advantages[sample.loss_mask].astype(np.float64))
        per_token = -(value - value.detach()).exp() * advantage[-len(value) :]
        total = total + (per_token.sum() if reduction == "token" else per_token.mean())
        units += len(value) if reduction == "token" else 1
    (total / units).backward()
    assert metrics["loss"] == pytest.approx(float(total.detach()) / units, rel=1e-4)
    gradients = export_like(trainer._maps, lambda p: p.main_grad)
    norm = math.sqrt(sum(float(w.grad.square().sum()) for w in weights.values()))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    for name, weight in weights.items():
        error = (gradients[name].double() - weight.grad).norm() / (weight.grad.norm() + 1e-9 * norm)
        assert float(error) < 1e-4, name


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_and_micro_batches_change_nothing(
    policy: Path, make_samples: MakeSamples, make_trainer: MakeTrainer, recompute: str
) -> None:
    samples = make_samples(LENGTHS)
    results = []
    for options in (
        {"micro_batch_tokens": 4096},
        {"micro_batch_tokens": 48, "recompute": recompute},
    ):
        trainer = make_trainer(optim={"lr": 0.0, "clip_grad": 0.0}, trainer=options)
        metrics = trainer.step(samples)
        results.append((metrics, export_like(trainer._maps, lambda p: p.main_grad)))
    (first, one), (second, other) = results
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-5)
    for name, gradient in one.items():
        assert torch.allclose(gradient, other[name], rtol=1e-3, atol=1e-6), name


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_log_probs_are_of_the_sampling_distribution(
    policy: Path, make_samples: MakeSamples, make_trainer: MakeTrainer, temperature: float
) -> None:
    samples = make_samples(LENGTHS)
    trainer = make_trainer(sampling={"temperature": temperature}, optim={"lr": 0.0})
    scores = trainer.score(samples, "r3", full_logits=True)
    values, _ = reference(policy, samples, temperature)
    for sample, score, value in zip(samples, scores, values, strict=True):
        assert score.logprobs[~sample.loss_mask].tolist() == [0.0] * int((~sample.loss_mask).sum())
        mask = sample.loss_mask.copy()
        mask[0] = False
        assert np.allclose(score.logprobs[mask], value.detach().numpy(), atol=2e-5)
        assert score.full_logprobs.shape == (len(value), 200)
        picked = score.full_logprobs[np.arange(len(value)), sample.token_ids[mask]]
        assert np.array_equal(picked, score.logprobs[mask])
    # With equal weights the ratio is 1 and nothing is mismatched.
    metrics = trainer.step(with_rollout(samples, scores))
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["kl_k3_rollout_old"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["f_1_1"] == 0.0
    assert metrics["clip_fraction"] == 0.0


def test_another_temperature_shows_as_mismatch(
    make_samples: MakeSamples, make_trainer: MakeTrainer
) -> None:
    samples = make_samples(LENGTHS)
    warm = make_trainer(sampling={"temperature": 1.3}).score(samples, "r3")
    metrics = make_trainer().step(with_rollout(samples, warm))
    assert metrics["abs_logprob_gap"] > 0.05
    assert metrics["f_1_1"] > 0.2


def test_metrics_are_those_of_the_arrays(
    policy: Path, make_samples: MakeSamples, make_trainer: MakeTrainer
) -> None:
    samples = make_samples(LENGTHS)
    trainer = make_trainer(algorithm={"num_mini_steps": 2})
    before = trainer.score(samples, "r3", full_logits=True)
    metrics = trainer.step(samples)
    mask = [np.flatnonzero(s.loss_mask[1:]) + 1 for s in samples]
    rollout = np.concatenate([s.rollout_logprobs[m] for s, m in zip(samples, mask, strict=True)])
    old = np.concatenate([s.logprobs[m] for s, m in zip(before, mask, strict=True)])
    assert metrics["kl_k3_rollout_old"] == pytest.approx(k3(rollout, old), rel=1e-5)
    assert metrics["abs_logprob_gap"] == pytest.approx(abs_gap(rollout, old), rel=1e-5)
    for name, share in f_taus(rollout, old).items():
        assert metrics[name] == pytest.approx(share)
    full = np.concatenate([s.full_logprobs for s in before])
    assert metrics["entropy"] == pytest.approx(-(np.exp(full) * full).sum(-1).mean(), rel=1e-4)
    assert exact_kl(full, full) == 0.0
    assert metrics["num_samples"] == len(LENGTHS)
    assert metrics["num_tokens"] == sum(len(m) for m in mask)
    assert metrics["num_fed_tokens"] == sum(n - 1 for n in LENGTHS)
    assert metrics["replayed_fraction"] == 1.0
    assert metrics["missing_fraction"] == 0.0
    assert metrics["staleness"] == 0.0
    layers = [metrics[f"router_flip_rate/layer_{i}"] for i in range(3)]
    assert metrics["router_flip_rate"] == pytest.approx(np.mean(layers))
    assert 0.9 < metrics["router_flip_rate"] <= metrics["tokens_with_flip"] <= 1.0  # random rows
    assert metrics["lr"] == pytest.approx(1e-3)
    assert metrics["ratio_max"] > 1.0  # the second mini-step starts from moved weights
    assert all(math.isfinite(value) for value in metrics.values())


def test_r3_off_and_r2_report_what_they_replayed(
    make_samples: MakeSamples, make_trainer: MakeTrainer
) -> None:
    samples = make_samples(LENGTHS)
    bare = [without_rows(s) for s in samples]
    reports = {
        mode: make_trainer(routing={"replay": mode}).step(samples if mode == "r3" else bare)
        for mode in ("r3", "r2", "off")
    }
    assert [reports[m]["replayed_fraction"] for m in ("r3", "r2", "off")] == [1.0, 1.0, 0.0]
    assert [reports[m]["missing_fraction"] for m in ("r3", "r2", "off")] == [0.0, 0.0, 0.0]
    assert "router_flip_rate" not in reports["off"]
    assert reports["r2"]["kl_k3_rollout_old"] == pytest.approx(
        reports["off"]["kl_k3_rollout_old"], rel=1e-6
    )
    assert reports["r3"]["kl_k3_rollout_old"] != pytest.approx(
        reports["off"]["kl_k3_rollout_old"], rel=1e-3
    )


def test_r2_of_one_mini_step_equals_no_replay(
    make_samples: MakeSamples, make_trainer: MakeTrainer
) -> None:
    """Before the first update the recorded choice is the live one."""
    samples = [without_rows(s) for s in make_samples(LENGTHS)]
    weights = []
    for mode in ("r2", "off"):
        trainer = make_trainer(routing={"replay": mode})
        trainer.step(samples)
        weights.append(trainer.publish_weights())
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_r2_replays_the_old_pass_through_later_mini_steps(
    make_samples: MakeSamples, make_trainer: MakeTrainer
) -> None:
    """After the first update the live routers choose other experts, r2 does not."""
    samples = [without_rows(s) for s in make_samples(LENGTHS)]
    weights = {}
    for mode in ("r2", "off"):
        trainer = make_trainer(
            routing={"replay": mode}, algorithm={"num_mini_steps": 2}, optim={"lr": 0.02}
        )
        trainer.step(samples)
        weights[mode] = trainer.publish_weights()
    assert any(not torch.equal(t, weights["off"][name]) for name, t in weights["r2"].items())


def test_the_same_step_twice_gives_the_same_weights(
    make_samples: MakeSamples, make_trainer: MakeTrainer
) -> None:
    samples = make_samples(LENGTHS)
    runs = []
    for _ in range(2):
        trainer = make_trainer(algorithm={"num_mini_steps": 2})
        metrics = trainer.step(samples)
        runs.append((metrics, trainer.publish_weights()))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(tensor, runs[1][1][name]) for name, tensor in runs[0][1].items())
