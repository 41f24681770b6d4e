"""The whole step: values, gradients, replay modes, faults, and resuming bit for bit."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from reference_policy import logits as reference_logits

from agent_rl.config import RoutingConfig
from agent_rl.errors import CheckpointError, ReplayError, TrainerError
from agent_rl.metrics.mismatch import abs_gap, exact_kl, f_taus, k3
from agent_rl.trainer.checkpoint import CheckpointStore
from agent_rl.trainer.folders import read_folder
from agent_rl.trainer.ingest import check_samples
from agent_rl.trainer.shape import ModelShape
from agent_rl.trainer.weights import export_like
from agent_rl.types import TrainSample
from routing_cache import ArrayRows, RoutingCacheError

pytestmark = pytest.mark.megatron

LENGTHS = (9, 30, 5, 17, 1, 12, 23, 2)


def with_rollout(samples: list[TrainSample], scores) -> list[TrainSample]:
    """The samples as if sampled by the policy that was scored."""
    return [
        dataclasses.replace(sample, rollout_logprobs=score.logprobs)
        for sample, score in zip(samples, scores, strict=True)
    ]


def without_rows(sample: TrainSample) -> TrainSample:
    return dataclasses.replace(sample, routed_experts=None)


def at_version(samples: list[TrainSample], version: int) -> list[TrainSample]:
    """The same samples, rows included, as of another weight version."""
    out = []
    for sample in samples:
        assert sample.routed_experts is not None
        rows, present = sample.routed_experts.gather()
        count = max(0, len(sample.token_ids) - 1)
        held = ArrayRows(
            sample.routed_experts.layout,  # type: ignore[attr-defined]
            sample.token_ids,
            rows[:count],
            present[:count],
            weight_version=version,
        )
        out.append(dataclasses.replace(sample, routed_experts=held, weight_versions=(version,)))
    return out


def reference(folder: Path, samples: list[TrainSample], temperature: float = 1.0):
    """Float64 log-probs of the sampled tokens by sample, and the weights that carry gradients."""
    shape = ModelShape.from_folder(folder)
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
    make_policy, make_samples, make_trainer, variant, reduction: str
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
    policy, make_samples, make_trainer, recompute: str
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
    policy, make_samples, make_trainer, temperature: float
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


def test_another_temperature_shows_as_mismatch(make_samples, make_trainer) -> None:
    samples = make_samples(LENGTHS)
    warm = make_trainer(sampling={"temperature": 1.3}).score(samples, "r3")
    metrics = make_trainer().step(with_rollout(samples, warm))
    assert metrics["abs_logprob_gap"] > 0.05
    assert metrics["f_1_1"] > 0.2


def test_metrics_are_those_of_the_arrays(policy, make_samples, make_trainer) -> None:
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


def test_r3_off_and_r2_report_what_they_replayed(make_samples, make_trainer) -> None:
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


def test_r2_of_one_mini_step_equals_no_replay(make_samples, make_trainer) -> None:
    """Before the first update the recorded choice is the live one."""
    samples = [without_rows(s) for s in make_samples(LENGTHS)]
    weights = []
    for mode in ("r2", "off"):
        trainer = make_trainer(routing={"replay": mode})
        trainer.step(samples)
        weights.append(trainer.publish_weights())
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_r2_replays_the_old_pass_through_later_mini_steps(make_samples, make_trainer) -> None:
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


def test_the_same_step_twice_gives_the_same_weights(make_samples, make_trainer) -> None:
    samples = make_samples(LENGTHS)
    runs = []
    for _ in range(2):
        trainer = make_trainer(algorithm={"num_mini_steps": 2})
        metrics = trainer.step(samples)
        runs.append((metrics, trainer.publish_weights()))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(tensor, runs[1][1][name]) for name, tensor in runs[0][1].items())


# --- faults -------------------------------------------------------------------------------------


def test_missing_rows_stop_a_strict_step_before_anything_moves(make_samples, make_trainer) -> None:
    samples = make_samples(LENGTHS)
    samples[1] = without_rows(samples[1])
    samples[3] = make_samples((17,), missing=(0,))[0]
    samples[3] = dataclasses.replace(samples[3], sample_id="sample-3")
    trainer = make_trainer()
    before = trainer.publish_weights()
    with pytest.raises(ReplayError, match=r"sample-1 \(29 rows, first 0\), sample-3 \(1 rows"):
        trainer.step(samples)
    after = trainer.publish_weights()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert trainer.weight_version == 0
    trainer.step(make_samples(LENGTHS))  # and the trainer still works


def test_missing_rows_are_routed_live_in_a_mixed_step(make_samples, make_trainer) -> None:
    samples = make_samples(LENGTHS)
    samples[1] = without_rows(samples[1])
    lost = int(samples[1].loss_mask[1:].sum())
    trainer = make_trainer(routing={"replay": "mixed", "max_missing_fraction": 0.5})
    live = trainer.score(samples, "off")[1].logprobs
    assert np.allclose(trainer.score(samples, "r3")[1].logprobs, live, atol=1e-6)
    metrics = trainer.step(samples)
    assert metrics["missing_fraction"] == pytest.approx(lost / metrics["num_tokens"])
    assert metrics["replayed_fraction"] == pytest.approx(1 - 29 / metrics["num_fed_tokens"])
    strict = make_trainer(routing={"replay": "mixed", "max_missing_fraction": 0.01})
    with pytest.raises(ReplayError, match=r"routing\.max_missing_fraction=0\.01"):
        strict.step(samples)


@pytest.mark.parametrize("mode", ["r3", "r2", "off"])
def test_rows_of_other_tokens_are_refused_in_every_mode(
    make_samples, make_trainer, mode: str
) -> None:
    """Two samples of one length with their rows swapped on the way."""
    samples = make_samples((12, 12, 9))
    samples[0], samples[1] = (
        dataclasses.replace(samples[0], routed_experts=samples[1].routed_experts),
        dataclasses.replace(samples[1], routed_experts=samples[0].routed_experts),
    )
    with pytest.raises(ReplayError, match="2 samples do not belong to their rows: sample-0"):
        make_trainer(routing={"replay": mode}).step(samples)


@pytest.mark.parametrize("dense", [[0], [1, 3]])
def test_rows_of_all_layers_and_of_moe_layers_score_alike(
    make_policy, make_samples, make_trainer, dense: list[int]
) -> None:
    """Engines answer with dense layers in the axis, as zeros, or without them."""
    folder = make_policy(num_hidden_layers=4, mlp_only_layers=dense)
    samples = make_samples((9, 14), folder=folder)
    trainer = make_trainer(folder)
    wide = []
    for sample in samples:
        rows, _ = sample.routed_experts.gather(stop=len(sample.token_ids) - 1)
        full = np.zeros((len(rows), 4, 4), dtype=np.uint8)
        full[:, [layer for layer in range(4) if layer not in dense]] = rows
        held = ArrayRows(trainer.row_layout, sample.token_ids, full)
        wide.append(dataclasses.replace(sample, routed_experts=held))
    for one, other in zip(trainer.score(samples, "r3"), trainer.score(wide, "r3"), strict=True):
        assert np.array_equal(one.logprobs, other.logprobs)
    with pytest.raises(RoutingCacheError):
        ArrayRows(trainer.row_layout, samples[0].token_ids, np.zeros((8, 5, 4), dtype=np.uint8))


def test_scoring_checks_digests_and_reports_the_live_choice(make_samples, make_trainer) -> None:
    samples = make_samples(LENGTHS)
    trainer = make_trainer()
    live = [s.live_experts for s in trainer.score(samples, "off", live_routing=True)]
    assert [len(rows) for rows in live] == [n - 1 for n in LENGTHS]
    assert {rows.dtype for rows in live} == {np.dtype(np.uint8)}  # as narrow as recorded ones
    own = [
        dataclasses.replace(
            s, routed_experts=ArrayRows(trainer.row_layout, s.token_ids, rows.astype(np.uint8))
        )
        for s, rows in zip(samples, live, strict=True)
    ]
    # Replaying the live choice is no replay, bit for bit, and flips nowhere.
    for one, other in zip(trainer.score(own, "r3"), trainer.score(samples, "off"), strict=True):
        assert np.array_equal(one.logprobs, other.logprobs)
    metrics = trainer.step(own)
    assert metrics["router_flip_rate"] == metrics["tokens_with_flip"] == 0.0
    foreign = dataclasses.replace(samples[0], routed_experts=samples[1].routed_experts)
    with pytest.raises(ReplayError, match="sample-0"):
        trainer.score([foreign], "off")


def test_rows_too_short_and_arrays_of_other_lengths_are_refused(make_samples, make_trainer) -> None:
    samples = make_samples((12, 9))
    longer = dataclasses.replace(
        samples[0], token_ids=np.append(samples[0].token_ids, 3).astype(np.int32)
    )
    with pytest.raises(ReplayError, match=r"sample-0.*\[12, 13\]"):
        make_trainer().step([longer, samples[1]])


def test_the_order_of_samples_does_not_pair_rows_with_others(make_samples, make_trainer) -> None:
    samples = make_samples(LENGTHS)
    plain = make_trainer().score(samples, "r3")
    order = [5, 0, 7, 3, 1, 6, 2, 4]
    mixed = make_trainer().score([samples[i] for i in order], "r3")
    for place, i in enumerate(order):
        assert np.allclose(mixed[place].logprobs, plain[i].logprobs, atol=1e-5)


def test_stale_rows_are_refused_or_allowed_as_configured(make_samples, make_trainer) -> None:
    samples = make_samples(LENGTHS)
    trainer = make_trainer()
    trainer.step(samples)
    with pytest.raises(ReplayError, match=r"sample-0 \(version 0\).*expected=1 to 1"):
        trainer.step(samples)
    trainer.step(at_version(samples, 1))
    patient = make_trainer(routing={"max_staleness": 1})
    patient.step(samples)
    metrics = patient.step(samples)
    assert metrics["staleness"] == metrics["staleness_max"] == 1.0
    with pytest.raises(ReplayError, match="expected=1 to 2"):
        patient.step(samples)


class SpannedRows(ArrayRows):
    """Rows that the engine made under several versions of the weights."""

    weight_versions = (1, 9)  # type: ignore[assignment]


def test_rows_of_weights_that_do_not_exist_yet_are_refused(make_samples) -> None:
    sample = make_samples((12,))[0]
    rows, present = sample.routed_experts.gather(stop=11)
    held = SpannedRows(sample.routed_experts.layout, sample.token_ids, rows, present)
    sample = dataclasses.replace(sample, routed_experts=held)
    with pytest.raises(ReplayError, match=r"sample-0 \(version 9\).*expected=0 to 1"):
        check_samples([sample], RoutingConfig(max_staleness=5), weight_version=1)


def test_nothing_to_train_is_counted_and_moves_nothing(make_samples, make_trainer) -> None:
    samples = [
        dataclasses.replace(s, loss_mask=np.zeros_like(s.loss_mask)) for s in make_samples(LENGTHS)
    ]
    trainer = make_trainer(algorithm={"num_mini_steps": 2})
    before = trainer.publish_weights()
    metrics = trainer.step(samples)
    assert metrics["loss"] == 0.0
    assert metrics["num_tokens"] == 0.0
    assert metrics["empty_mini_batches"] == 2.0
    assert all(math.isfinite(value) for value in metrics.values())
    after = trainer.publish_weights()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    with pytest.raises(TrainerError, match="got=0"):
        trainer.step([])


def test_an_empty_mini_batch_beside_a_full_one(make_samples, make_trainer) -> None:
    samples = make_samples((1, 12))  # the first one has nothing that could be trained
    metrics = make_trainer(algorithm={"num_mini_steps": 2}).step(samples)
    assert metrics["empty_mini_batches"] == 1.0
    assert metrics["grad_norm"] > 0


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"advantages": 3e38}, "gradient is not finite"),  # each a number, their sum is none
        ({"advantages": np.inf}, r"sample-0 \(advantages\[\d+\] = inf"),
        ({"rollout_logprobs": np.nan}, r"sample-0 \(rollout_logprobs\[\d+\] = nan"),
        ({"rollout_logprobs": -np.inf}, r"sample-0 \(rollout_logprobs\[\d+\] = -inf"),
    ],
)
def test_values_that_are_not_finite_move_no_weight(
    make_samples, make_trainer, values: dict[str, float], words: str
) -> None:
    samples = make_samples(LENGTHS)
    samples[0] = dataclasses.replace(
        samples[0],
        **{k: np.where(samples[0].loss_mask, v, 0).astype(np.float32) for k, v in values.items()},
    )
    trainer = make_trainer()
    before = trainer.publish_weights()
    with pytest.raises(TrainerError, match=words):
        trainer.step(samples)
    after = trainer.publish_weights()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert trainer.weight_version == 0


# --- optimizer, schedule, resume ----------------------------------------------------------------


def test_zero_advantages_leave_the_weights(make_samples, make_trainer) -> None:
    samples = [
        dataclasses.replace(s, advantages=np.zeros_like(s.advantages))
        for s in make_samples(LENGTHS)
    ]
    trainer = make_trainer()
    before = trainer.publish_weights()
    metrics = trainer.step(samples)
    assert metrics["grad_norm"] == 0.0
    after = trainer.publish_weights()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_positive_advantages_raise_the_log_probs(make_samples, make_trainer) -> None:
    samples = [
        dataclasses.replace(s, advantages=s.loss_mask.astype(np.float32))
        for s in make_samples(LENGTHS)
    ]
    trainer = make_trainer(routing={"max_staleness": 9}, algorithm={"num_mini_steps": 2})
    sums = [sum(float(s.logprobs.sum()) for s in trainer.score(samples, "r3"))]
    for _ in range(3):
        trainer.step(samples)
        sums.append(sum(float(s.logprobs.sum()) for s in trainer.score(samples, "r3")))
    assert sums == sorted(sums)
    assert sums[-1] > sums[0] + 10


def test_warm_start_loss_needs_no_rows_and_learns(make_samples, make_trainer) -> None:
    samples = [
        dataclasses.replace(without_rows(s), advantages=s.loss_mask.astype(np.float32))
        for s in make_samples(LENGTHS)
    ]
    trainer = make_trainer(algorithm={"loss": "sft"}, routing={"replay": "off"})
    losses = [trainer.step(samples)["loss"] for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert "kl_k3_rollout_old" not in trainer.step(samples)


def test_schedule_warms_up_from_a_first_step_that_counts(make_samples, make_trainer) -> None:
    samples = make_samples((9, 12))
    trainer = make_trainer(
        optim={"lr": 4e-3, "warmup_steps": 4, "decay": "linear", "min_lr": 0.0},
        train={"steps": 8},
        routing={"replay": "off"},
    )
    rates = [trainer.step(samples)["lr"] for _ in range(8)]
    assert rates[:4] == pytest.approx([1e-3, 1.75e-3, 2.5e-3, 3.25e-3])
    assert rates[4] == pytest.approx(4e-3)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_clipping_bounds_the_step(make_samples, make_trainer) -> None:
    samples = make_samples(LENGTHS)
    free = make_trainer(optim={"clip_grad": 0.0, "lr": 0.0})
    tight = make_trainer(optim={"clip_grad": 0.01, "lr": 0.0})
    norm = free.step(samples)["grad_norm"]
    assert tight.step(samples)["grad_norm"] == pytest.approx(norm, rel=1e-5)
    clipped = export_like(tight._maps, lambda p: p.main_grad)
    total = math.sqrt(sum(float(g.square().sum()) for g in clipped.values()))
    assert norm > 0.02
    assert total == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_continues_bit_for_bit(
    tmp_path: Path, make_samples, make_trainer, dtype: str
) -> None:
    options = {
        "trainer": {"dtype": dtype},
        "algorithm": {"num_mini_steps": 2},
        "optim": {"decay": "cosine", "warmup_steps": 2},
    }
    store = CheckpointStore(tmp_path)
    trainer = make_trainer(**options)
    for version in range(2):
        trainer.step(at_version(make_samples(LENGTHS, seed=version), version))
    store.save(2, trainer.save)
    rest = [at_version(make_samples(LENGTHS, seed=version), version) for version in (2, 3)]
    expected = [trainer.step(samples) for samples in rest]
    other = make_trainer(**options)
    found = store.latest()
    assert found is not None
    other.load(found.folder)
    assert other.weight_version == 2
    assert [other.step(samples) for samples in rest] == expected
    ours, theirs = other.publish_weights(), trainer.publish_weights()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_a_checkpoint_before_the_first_step_and_over_a_used_trainer(
    tmp_path: Path, make_samples, make_trainer
) -> None:
    samples = make_samples(LENGTHS)
    fresh = make_trainer()
    fresh.save(tmp_path)
    used = make_trainer()
    used.step(samples)
    used.load(tmp_path)
    assert used.weight_version == 0
    assert used.step(samples) == fresh.step(samples)


def test_a_checkpoint_is_a_model_folder(tmp_path: Path, make_samples, make_trainer) -> None:
    from transformers import Qwen3MoeForCausalLM

    trainer = make_trainer()
    trainer.step(make_samples(LENGTHS))
    trainer.save(tmp_path)
    model = Qwen3MoeForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    published = trainer.publish_weights()
    parameters = dict(model.named_parameters())
    assert set(parameters) == set(published)
    assert all(torch.equal(p, published[name]) for name, p in parameters.items())


def test_foreign_folders_are_not_loaded(tmp_path: Path, policy, make_trainer) -> None:
    trainer = make_trainer()
    with pytest.raises(CheckpointError, match="not a trainer checkpoint"):
        trainer.load(policy)
    make_trainer(trainer={"dtype": "bfloat16"}).save(tmp_path)
    with pytest.raises(CheckpointError, match="got=bfloat16 expected=float32"):
        trainer.load(tmp_path)


def test_threads_are_given_back(make_samples, make_trainer) -> None:
    torch.set_num_threads(2)
    make_trainer(trainer={"num_threads": 1}).step(make_samples((9, 12)))
    assert torch.get_num_threads() == 2
