"""Weights are those of one version, or nobody gets them: failed steps and refused checkpoints."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from fixture_types import MakePolicy, MakeSamples, MakeTrainer

from agent_rl.errors import CheckpointError, TrainerError
from agent_rl.trainer.megatron import MegatronTrainer
from agent_rl.trainer.workers.rank import failure
from agent_rl.types import TrainSample

pytestmark = pytest.mark.megatron


def held(trainer: MegatronTrainer) -> dict[str, torch.Tensor]:
    """Weights and optimizer state."""
    found = trainer.publish_weights()
    for m in trainer._maps:
        if m.trained:
            for kind, tensors in trainer._optimizer.state_of(m).items():
                found |= {f"{kind}/{m.hf_names[0]}/{i}": t.clone() for i, t in enumerate(tensors)}
    return found


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


def test_a_failure_behind_the_first_mini_step_leaves_weights_nobody_gets(
    make_samples: MakeSamples, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """The bad sample is in either mini-step: in the first one nothing has moved yet."""
    trainer = make_trainer(algorithm={"num_mini_steps": 2}, routing={"max_staleness": 9})
    trainer.step(make_samples((9, 12)))
    (tmp_path / "saved").mkdir()
    trainer.save(tmp_path / "saved")
    before, torn = held(trainer), []
    for bad in (0, 1):
        samples = make_samples((9, 12), seed=1)
        huge = np.where(samples[bad].loss_mask, 3e38, 0).astype(np.float32)
        samples[bad] = dataclasses.replace(samples[bad], advantages=huge)
        with pytest.raises(TrainerError, match="its optimizer step was not taken"):
            trainer.step(samples)
        torn.append(trainer.is_torn)
        if trainer.is_torn:
            gives_nothing(trainer, samples, tmp_path)
            trainer.load(tmp_path / "saved")
        assert same(held(trainer), before)
        assert trainer.weight_version == 1
    assert sorted(torn) == [False, True]


def gives_nothing(trainer: MegatronTrainer, samples: list[TrainSample], folder: Path) -> None:
    for ask in (
        lambda: trainer.step(samples),
        lambda: trainer.score(samples, "off"),
        trainer.publish_weights,
        lambda: trainer.save(folder),
    ):
        with pytest.raises(TrainerError, match=r"between two versions.*load a checkpoint"):
            ask()


def test_a_rank_whose_weights_moved_is_not_to_be_trusted() -> None:
    error = TrainerError("the gradient is not finite")
    assert failure(error).is_ours
    torn = failure(error, torn=True)
    assert (torn.is_ours, torn.error) == (False, error)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"num_hidden_layers": 4}, "num_layers got=4 expected=3"),
        ({"num_hidden_layers": 2}, "num_layers got=2 expected=3"),
        ({"num_experts": 16}, "num_experts got=16 expected=32"),
        ({"num_experts_per_tok": 2}, "moe_top_k got=2 expected=4"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_theta got=500000"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(
    make_policy: MakePolicy,
    make_samples: MakeSamples,
    make_trainer: MakeTrainer,
    tmp_path: Path,
    other: dict[str, object],
    named: str,
) -> None:
    """Also one whose tensors are all there, such as those of a deeper model."""
    make_trainer(make_policy(**other)).save(tmp_path)
    trainer = make_trainer()
    trainer.step(make_samples((9, 12)))
    before = held(trainer)
    with pytest.raises(CheckpointError, match=f"another model.*{named}.*policy that the run began"):
        trainer.load(tmp_path)
    assert same(held(trainer), before)
    assert trainer.weight_version == 1


@pytest.mark.parametrize("part", ["trainer/optimizer-00000.safetensors", "trainer/position.json"])
def test_a_checkpoint_that_lacks_state_is_refused_and_changes_nothing(
    make_samples: MakeSamples, make_trainer: MakeTrainer, tmp_path: Path, part: str
) -> None:
    trainer = make_trainer(routing={"max_staleness": 9})
    trainer.step(make_samples((9, 12)))
    trainer.save(tmp_path)
    trainer.step(make_samples((9, 12), seed=1))
    before = held(trainer)
    (tmp_path / part).unlink()
    with pytest.raises(CheckpointError, match=r"incomplete|not a trainer checkpoint"):
        trainer.load(tmp_path)
    assert same(held(trainer), before)
    assert trainer.weight_version == 2
