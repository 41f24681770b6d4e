"""What a step refuses, and what it does when there is nothing or nothing finite to train on."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from fixture_types import MakePolicy, MakeSamples, MakeTrainer
from trainer_samples import LENGTHS, at_version, without_rows

from agent_rl.config.schema import RoutingConfig
from agent_rl.errors import ReplayError, TrainerError
from agent_rl.trainer.ingest import check_samples
from routing_cache import ArrayRows, RoutingCacheError

pytestmark = pytest.mark.megatron


def test_missing_rows_stop_a_strict_step_before_anything_moves(
    make_samples: MakeSamples, make_trainer: MakeTrainer
) -> None:
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


def test_missing_rows_are_routed_live_in_a_mixed_step(
    make_samples: MakeSamples, make_trainer: MakeTrainer
) -> None:
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
    make_samples: MakeSamples, make_trainer: MakeTrainer, mode: str
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
    make_policy: MakePolicy, make_samples: MakeSamples, make_trainer: MakeTrainer, dense: list[int]
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


def test_scoring_checks_digests_and_reports_the_live_choice(
    make_samples: MakeSamples, make_trainer: MakeTrainer
) -> None:
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


def test_rows_too_short_and_arrays_of_other_lengths_are_refused(
    make_samples: MakeSamples, make_trainer: MakeTrainer
) -> None:
    samples = make_samples((12, 9))
    longer = dataclasses.replace(
        samples[0], token_ids=np.append(samples[0].token_ids, 3).astype(np.int32)
    )
    with pytest.raises(ReplayError, match=r"sample-0.*\[12, 13\]"):
        make_trainer().step([longer, samples[1]])


def test_the_order_of_samples_does_not_pair_rows_with_others(
    make_samples: MakeSamples, make_trainer: MakeTrainer
) -> None:
    samples = make_samples(LENGTHS)
    plain = make_trainer().score(samples, "r3")
    order = [5, 0, 7, 3, 1, 6, 2, 4]
    mixed = make_trainer().score([samples[i] for i in order], "r3")
    for place, i in enumerate(order):
        assert np.allclose(mixed[place].logprobs, plain[i].logprobs, atol=1e-5)


def test_stale_rows_are_refused_or_allowed_as_configured(
    make_samples: MakeSamples, make_trainer: MakeTrainer
) -> None:
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


def test_rows_of_weights_that_do_not_exist_yet_are_refused(make_samples: MakeSamples) -> None:
    sample = make_samples((12,))[0]
    rows, present = sample.routed_experts.gather(stop=11)
    held = SpannedRows(sample.routed_experts.layout, sample.token_ids, rows, present)
    sample = dataclasses.replace(sample, routed_experts=held)
    with pytest.raises(ReplayError, match=r"sample-0 \(version 9\).*expected=0 to 1"):
        check_samples([sample], RoutingConfig(max_staleness=5), weight_version=1)


def test_nothing_to_train_is_counted_and_moves_nothing(
    make_samples: MakeSamples, make_trainer: MakeTrainer
) -> None:
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


def test_an_empty_mini_batch_beside_a_full_one(
    make_samples: MakeSamples, make_trainer: MakeTrainer
) -> None:
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
    make_samples: MakeSamples, make_trainer: MakeTrainer, values: dict[str, float], words: str
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
