"""Over several steps: optimizer, schedule, and resuming bit for bit."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from fixture_types import MakeSamples, MakeTrainer
from trainer_samples import LENGTHS, at_version, without_rows

from agent_rl.errors import CheckpointError
from agent_rl.trainer.checkpoint import CheckpointStore
from agent_rl.trainer.weights import export_like

pytestmark = pytest.mark.megatron


def test_zero_advantages_leave_the_weights(
    make_samples: MakeSamples, make_trainer: MakeTrainer
) -> None:
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


def test_positive_advantages_raise_the_log_probs(
    make_samples: MakeSamples, make_trainer: MakeTrainer
) -> None:
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


def test_warm_start_loss_needs_no_rows_and_learns(
    make_samples: MakeSamples, make_trainer: MakeTrainer
) -> None:
    samples = [
        dataclasses.replace(without_rows(s), advantages=s.loss_mask.astype(np.float32))
        for s in make_samples(LENGTHS)
    ]
    trainer = make_trainer(algorithm={"loss": "sft"}, routing={"replay": "off"})
    losses = [trainer.step(samples)["loss"] for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert "kl_k3_rollout_old" not in trainer.step(samples)


def test_schedule_warms_up_from_a_first_step_that_counts(
    make_samples: MakeSamples, make_trainer: MakeTrainer
) -> None:
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


def test_clipping_bounds_the_step(make_samples: MakeSamples, make_trainer: MakeTrainer) -> None:
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
    tmp_path: Path, make_samples: MakeSamples, make_trainer: MakeTrainer, dtype: str
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
    tmp_path: Path, make_samples: MakeSamples, make_trainer: MakeTrainer
) -> None:
    samples = make_samples(LENGTHS)
    fresh = make_trainer()
    fresh.save(tmp_path)
    used = make_trainer()
    used.step(samples)
    used.load(tmp_path)
    assert used.weight_version == 0
    assert used.step(samples) == fresh.step(samples)


def test_a_checkpoint_is_a_model_folder(
    tmp_path: Path, make_samples: MakeSamples, make_trainer: MakeTrainer
) -> None:
    from transformers import Qwen3MoeForCausalLM

    trainer = make_trainer()
    trainer.step(make_samples(LENGTHS))
    trainer.save(tmp_path)
    model = Qwen3MoeForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    published = trainer.publish_weights()
    parameters = dict(model.named_parameters())
    assert set(parameters) == set(published)
    assert all(torch.equal(p, published[name]) for name, p in parameters.items())


def test_foreign_folders_are_not_loaded(
    tmp_path: Path, policy: Path, make_trainer: MakeTrainer
) -> None:
    trainer = make_trainer()
    with pytest.raises(CheckpointError, match="not a trainer checkpoint"):
        trainer.load(policy)
    make_trainer(trainer={"dtype": "bfloat16"}).save(tmp_path)
    with pytest.raises(CheckpointError, match="got=bfloat16 expected=float32"):
        trainer.load(tmp_path)


def test_threads_are_given_back(make_samples: MakeSamples, make_trainer: MakeTrainer) -> None:
    torch.set_num_threads(2)
    make_trainer(trainer={"num_threads": 1}).step(make_samples((9, 12)))
    assert torch.get_num_threads() == 2
