"""Whole trainer steps whose loss has every term, against a float64 reference and each other."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from fixture_types import MakeSamples, MakeTrainer
from reference_policy import logits as reference_logits

from agent_rl.errors import ReplayError
from agent_rl.model.config_json import read_shape
from agent_rl.model.folders import read_folder
from agent_rl.trainer.reference_policy import ReferencePolicy
from agent_rl.trainer.weights import export_like
from agent_rl.types import TrainSample

pytestmark = pytest.mark.megatron

LENGTHS = (9, 30, 5, 17, 1, 12, 23, 2)
STILL = {"lr": 0.0, "clip_grad": 0.0}
TERMS = {
    "kl_weight": 0.3,
    "entropy_weight": 0.2,
    "router_consistency_weight": 0.7,
    "correction": "tis",
}


def sampled_at(sample: TrainSample) -> torch.Tensor:
    """Positions whose next token is trained."""
    return torch.from_numpy(np.flatnonzero(sample.loss_mask[1:]))


def reference_loss(
    folder: Path, samples: list[TrainSample], config: dict, reduction: str
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of ``TERMS`` in float64 at the starting weights, and those weights."""
    shape = read_shape(folder)
    weights = {n: t.double().requires_grad_() for n, t in read_folder(folder).items()}
    total, units = torch.zeros((), dtype=torch.float64), 0
    for sample in samples:
        at = sampled_at(sample)
        if not len(at):
            continue
        count = len(sample.token_ids) - 1
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))
        assert sample.routed_experts is not None
        rows = torch.from_numpy(sample.routed_experts.gather(stop=count)[0].astype(np.int64))
        routers: list[torch.Tensor] = []
        full = reference_logits(weights, shape, ids[:-1], rows, routers).log_softmax(-1)[at]
        with torch.no_grad():  # the frozen reference has the same weights and its own routers
            frozen = reference_logits(weights, shape, ids[:-1]).log_softmax(-1)[at]
        labels = ids[1:][at].unsqueeze(1)
        value, ref = full.gather(1, labels).squeeze(1), frozen.gather(1, labels).squeeze(1)
        advantage = torch.from_numpy(sample.advantages.astype(np.float64))[1:][at]
        rollout = torch.from_numpy(sample.rollout_logprobs.astype(np.float64))[1:][at]
        correction = (value.detach() - rollout).exp().clamp(max=2.0)
        per_token = -correction * (value - value.detach()).exp() * advantage
        per_token = per_token + config["kl_weight"] * ((ref - value).exp() - 1 - (ref - value))
        per_token = per_token + config["entropy_weight"] * (full.exp() * full).sum(-1)
        terms = [
            -scores.log_softmax(-1)[at].gather(1, rows[at, layer]).exp().sum(-1).log()
            for layer, scores in enumerate(routers)
        ]
        per_token = per_token + config["router_consistency_weight"] * torch.stack(terms).mean(0)
        share = {"token": 1.0, "sequence": 1 / len(at), "constant": 1 / 224}[reduction]
        total = total + share * per_token.sum()
        units += len(at) if reduction == "token" else 1
    return total / units, weights


@pytest.mark.parametrize(
    ("recompute", "budget", "reduction"),
    [
        ("none", 4096, "token"),
        ("none", 48, "sequence"),
        ("selective", 64, "token"),
        ("full", 48, "constant"),
    ],
)
def test_gradient_of_all_terms_equals_the_float64_reference(
    policy: Path,
    make_samples: MakeSamples,
    make_trainer: MakeTrainer,
    recompute: str,
    budget: int,
    reduction: str,
) -> None:
    samples = make_samples(LENGTHS)
    trainer = make_trainer(
        optim=STILL,
        algorithm={**TERMS, "loss_reduction": reduction},
        trainer={"recompute": recompute, "micro_batch_tokens": budget},
    )
    metrics = trainer.step(samples)
    loss, weights = reference_loss(policy, samples, TERMS, reduction)
    loss.backward()
    gradients = export_like(trainer._maps, lambda p: p.main_grad)
    norm = math.sqrt(sum(float(w.grad.square().sum()) for w in weights.values()))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    for name, weight in weights.items():
        error = (gradients[name].double() - weight.grad).norm() / (weight.grad.norm() + 1e-9 * norm)
        assert float(error) < 1e-4, name
    assert metrics["router_consistency"] > 0.1
    assert metrics["kl_reference"] > 0.1  # random rows are another policy
    assert 0 < metrics["correction_weight"] < 2.0


def test_the_consistency_term_pulls_the_live_router_to_the_rows(
    make_samples: MakeSamples, make_trainer: MakeTrainer
) -> None:
    samples = [
        dataclasses.replace(s, advantages=np.zeros_like(s.advantages))
        for s in make_samples(LENGTHS)
    ]
    options = {"routing": {"max_staleness": 99}, "optim": {"lr": 1e-2}}
    trainer = make_trainer(algorithm={"router_consistency_weight": 1.0}, **options)
    seen = [trainer.step(samples) for _ in range(8)]
    terms = [metrics["router_consistency"] for metrics in seen]
    assert terms == sorted(terms, reverse=True)
    assert seen[-1]["router_flip_rate"] < seen[0]["router_flip_rate"]
    off = make_trainer(**options).step(samples)
    assert off["grad_norm"] == 0.0
    assert "router_consistency" not in off


def test_missing_rows_and_padding_stay_out_of_the_consistency_term(
    make_samples: MakeSamples, make_trainer: MakeTrainer
) -> None:
    """Half of the rows missing: the mean is over what is there, in every micro-batching."""
    samples = make_samples(LENGTHS, missing=())
    options = {"routing": {"replay": "mixed", "max_missing_fraction": 1.0}, "optim": STILL}
    algorithm = {"router_consistency_weight": 1.0}
    whole = make_trainer(algorithm=algorithm, **options).step(samples)["router_consistency"]
    bare = [dataclasses.replace(s, routed_experts=None) for s in samples]
    nothing = make_trainer(algorithm=algorithm, **options).step(bare)
    assert "router_consistency" not in nothing
    mixed = [bare[0], bare[1], *samples[2:]]
    few = make_trainer(algorithm=algorithm, **options).step(samples[2:])["router_consistency"]
    for budget in (32, 4096):
        trainer = make_trainer(
            algorithm=algorithm, trainer={"micro_batch_tokens": budget}, **options
        )
        assert trainer.step(mixed)["router_consistency"] == pytest.approx(few, rel=1e-5)
    assert few != pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize("loss", ["gspo", "dr_grpo", "dapo", "cispo"])
@pytest.mark.parametrize("correction", ["none", "mis"])
def test_how_sequences_are_put_into_micro_batches_changes_nothing(
    make_samples: MakeSamples, make_trainer: MakeTrainer, loss: str, correction: str
) -> None:
    """Two mini-steps, so that ratios have left 1; one, several and packed micro-batches."""
    samples = make_samples((40, 21, 9, 33, 17, 12))
    rollout = make_trainer().score(samples, "r3")
    samples = [
        dataclasses.replace(s, rollout_logprobs=score.logprobs + np.float32(0.02) * s.loss_mask)
        for s, score in zip(samples, rollout, strict=True)
    ]
    results = []
    for options in (
        {"micro_batch_tokens": 4096},
        {"micro_batch_tokens": 48},
        {"micro_batch_tokens": 96, "packed": True},
    ):
        algorithm = {"loss": loss, "correction": correction, "num_mini_steps": 2}
        if correction == "mis":
            algorithm["correction_low"] = 0.85
            algorithm["correction_high"] = 1.5
        # No clipping: a ratio at its bound may fall either way by rounding.
        algorithm |= {"clip_low": 1.0, "clip_high": 9.0}
        trainer = make_trainer(algorithm=algorithm, trainer=options)
        metrics = trainer.step(samples)
        results.append((metrics, trainer.publish_weights()))
    first, weights = results[0]
    assert first["ratio_max"] > 1.01
    for other, moved in results[1:]:
        assert other["loss"] == pytest.approx(first["loss"], rel=1e-4, abs=1e-6)
        assert other["grad_norm_max"] == pytest.approx(first["grad_norm_max"], rel=1e-4)
        for name, tensor in weights.items():
            # Adam turns a rounding difference of a tiny gradient into a part of the step.
            assert float((moved[name] - tensor).abs().mean()) < 2e-5, name
    if correction == "mis":
        assert 0 < first["correction_masked"] < 1


def test_the_reference_stays_the_starting_policy_also_after_a_resume(
    tmp_path: Path, make_samples: MakeSamples, make_trainer: MakeTrainer
) -> None:
    options = {
        "algorithm": {"kl_weight": 0.1},
        "routing": {"replay": "off"},
        "optim": {"lr": 5e-3},
    }
    samples = make_samples(LENGTHS)
    trainer = make_trainer(**options)
    first = trainer.step(samples)["kl_reference"]
    assert first == pytest.approx(0.0, abs=1e-9)  # equal weights, both with live routers
    trainer.save(tmp_path)
    second = trainer.step(samples)["kl_reference"]
    assert second > 1e-4
    resumed = make_trainer(**options)
    resumed.load(tmp_path)
    assert resumed.step(samples)["kl_reference"] == second


def test_the_reference_routes_for_itself_whatever_is_replayed(
    make_samples: MakeSamples, make_trainer: MakeTrainer
) -> None:
    """Its log-probs, seen through the metric, do not move when the policy's rows change."""
    samples = make_samples(LENGTHS)
    algorithm = {"kl_weight": 0.1}
    values = {}
    for mode in ("off", "r2", "r3"):
        trainer = make_trainer(algorithm=algorithm, routing={"replay": mode}, optim=STILL)
        values[mode] = trainer.step(samples)["kl_reference"]
    live = make_trainer().score(samples, "off")
    replayed = make_trainer().score(samples, "r3")
    gap = np.concatenate(
        [
            (a.logprobs - b.logprobs)[1:][s.loss_mask[1:]]
            for s, a, b in zip(samples, live, replayed, strict=True)
        ]
    ).astype(np.float64)
    assert values["r3"] == pytest.approx(float(np.mean(np.expm1(gap) - gap)), rel=1e-4)
    assert values["off"] == pytest.approx(0.0, abs=1e-9)
    assert values["r2"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swapping_the_reference_in_gives_the_weights_back_bit_for_bit(dtype: torch.dtype) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(5, 3)).to(dtype)
    module[0].register_buffer("bias_of_a_router", torch.ones(3))
    reference = ReferencePolicy([module])
    start = [t.clone() for t in (*module.parameters(), *module.buffers())]
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.add_(torch.rand_like(tensor))
    moved = [t.clone() for t in (*module.parameters(), *module.buffers())]

    def held() -> list[torch.Tensor]:
        return [*module.parameters(), *module.buffers()]

    with reference.active():
        assert all(torch.equal(a, b) for a, b in zip(held(), start, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(held(), moved, strict=True))
    with pytest.raises(RuntimeError, match="inside"), reference.active():
        raise RuntimeError("inside")
    assert all(torch.equal(a, b) for a, b in zip(held(), moved, strict=True))


def test_the_alarm_is_a_metric_of_the_step(
    make_samples: MakeSamples, make_trainer: MakeTrainer
) -> None:
    samples = make_samples(LENGTHS)  # rollout log-probs at random
    assert make_trainer().step(samples)["alarm_f2"] == 2.0
    scores = make_trainer().score(samples, "r3")
    same = [
        dataclasses.replace(s, rollout_logprobs=score.logprobs)
        for s, score in zip(samples, scores, strict=True)
    ]
    assert make_trainer().step(same)["alarm_f2"] == 0.0


def test_mixed_is_r3_where_rows_are_complete(
    make_samples: MakeSamples, make_trainer: MakeTrainer
) -> None:
    samples = make_samples(LENGTHS)
    strict, mixed = (make_trainer(routing={"replay": mode}) for mode in ("r3", "mixed"))
    assert strict.step(samples) == mixed.step(samples)
    ours, theirs = strict.publish_weights(), mixed.publish_weights()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    lossy = [dataclasses.replace(samples[0], routed_experts=None), *samples[1:]]
    with pytest.raises(ReplayError, match=r"routing\.replay=mixed trains them"):
        make_trainer().step(lossy)
