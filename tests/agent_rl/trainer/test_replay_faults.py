"""Rows that get lost on the way to the trainer, and layers of a later pipeline stage."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from family_policies import write_family
from fixture_types import MakeSamples, MakeTrainer
from safetensors.torch import load_file, save_file

from agent_rl.errors import ReplayError
from agent_rl.trainer.batch import lay_out
from agent_rl.types import Mask, Rows, TokenIds, TrainSample
from routing_cache import ArrayRows, PackedRows, RowLayout, pack

LENGTHS = (12, 16, 9, 14)
ORDER = (2, 0, 3, 1)


class ShortRows:
    """Rows of a store that lost the last one and does not say so."""

    def __init__(self, rows: ArrayRows) -> None:
        self._rows = rows
        self.num_tokens = rows.num_tokens
        self.weight_versions = rows.weight_versions

    def gather(
        self, *, layers: Sequence[int] | None = None, start: int = 0, stop: int | None = None
    ) -> tuple[Rows, Mask]:
        rows, present = self._rows.gather(layers=layers, start=start, stop=stop)
        return rows[:-1], present[:-1]

    def verify(self, token_ids: TokenIds) -> None:
        self._rows.verify(token_ids)

    def release(self) -> None: ...


def without_rows(sample: TrainSample) -> TrainSample:
    return dataclasses.replace(sample, routed_experts=None)


def one_row_too_few(sample: TrainSample) -> TrainSample:
    """The last fed token has no row, and the rows say so."""
    assert isinstance(sample.routed_experts, ArrayRows)
    count = len(sample.token_ids) - 1
    rows, present = sample.routed_experts.gather(stop=count)
    present = present.copy()
    present[-1] = False
    short = ArrayRows(sample.routed_experts.layout, sample.token_ids, rows, present)
    return dataclasses.replace(sample, routed_experts=short)


@pytest.fixture
def lossy(make_samples: MakeSamples) -> list[TrainSample]:
    """Four samples: the second came without rows, the third one row short; order 2, 0, 3, 1."""
    samples = make_samples(LENGTHS)
    samples[1], samples[2] = without_rows(samples[1]), one_row_too_few(samples[2])
    return [samples[i] for i in ORDER]


@pytest.mark.megatron
def test_a_strict_step_names_the_samples_and_moves_nothing(
    lossy: list[TrainSample], make_trainer: MakeTrainer
) -> None:
    trainer = make_trainer()
    before = trainer.publish_weights()
    names = r"2 samples .*got=sample-2 \(1 rows, first 7\), sample-1 \(15 rows, first 0\) "
    with pytest.raises(ReplayError, match=names):
        trainer.step(lossy)
    after = trainer.publish_weights()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert trainer.weight_version == 0


@pytest.mark.megatron
def test_a_mixed_step_reports_the_fraction_and_stops_above_the_allowed(
    lossy: list[TrainSample], make_trainer: MakeTrainer
) -> None:
    targets = sum(int(sample.loss_mask[1:].sum()) for sample in lossy)
    lost = int(lossy[3].loss_mask[1:].sum()) + 1  # all of the second, the last of the third
    fed = sum(LENGTHS) - len(LENGTHS)
    exact = lost / targets
    trainer = make_trainer(routing={"replay": "mixed", "max_missing_fraction": exact})
    metrics = trainer.step(lossy)
    assert metrics["missing_fraction"] == pytest.approx(exact)
    assert metrics["replayed_fraction"] == pytest.approx(1 - 16 / fed)
    below = make_trainer(routing={"replay": "mixed", "max_missing_fraction": exact - 1e-6})
    before = below.publish_weights()
    with pytest.raises(ReplayError, match=re.escape(f"got={exact:.4f} (sample-2 (1 rows")):
        below.step(lossy)
    after = below.publish_weights()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.megatron
def test_scores_survive_permutation_packing_and_a_split(
    make_samples: MakeSamples, make_trainer: MakeTrainer
) -> None:
    """What two data-parallel ranks receive scores as what was sent, sample by sample."""
    samples = make_samples(LENGTHS)
    trainer = make_trainer()
    plain = trainer.score(samples, "r3")
    live = trainer.score(samples, "off")
    for rank in range(2):
        mine = ORDER[rank::2]
        data = pack([samples[i].routed_experts for i in mine]).tobytes()
        received = [
            dataclasses.replace(samples[i], routed_experts=rows)
            for i, rows in zip(mine, PackedRows.from_bytes(data), strict=True)
        ]
        for i, score in zip(mine, trainer.score(received, "r3"), strict=True):
            assert np.allclose(score.logprobs, plain[i].logprobs, atol=1e-5)
            assert not np.allclose(score.logprobs, live[i].logprobs, atol=1e-2)
        received[0], received[1] = (
            dataclasses.replace(received[0], routed_experts=received[1].routed_experts),
            dataclasses.replace(received[1], routed_experts=received[0].routed_experts),
        )
        with pytest.raises(ReplayError, match="2 samples do not belong to their rows"):
            trainer.step(received)


@pytest.mark.megatron
@pytest.mark.parametrize("mode", ["r3", "mixed"])
def test_rows_that_are_silently_short_are_damage_in_every_mode(
    make_samples: MakeSamples, make_trainer: MakeTrainer, mode: str
) -> None:
    """Not the missing state: nobody marked the lost row, so the others may be shifted too."""
    samples = make_samples(LENGTHS)
    rows = samples[2].routed_experts
    assert isinstance(rows, ArrayRows)
    samples[2] = dataclasses.replace(samples[2], routed_experts=ShortRows(rows))
    trainer = make_trainer(routing={"replay": mode, "max_missing_fraction": 1.0})
    with pytest.raises(ReplayError, match=r"sample-2: .*got=7 expected=8"):
        trainer.step(samples)
    assert trainer.weight_version == 0


@pytest.mark.megatron
def test_a_multi_token_prediction_layer_is_neither_built_nor_driven(
    tmp_path: Path, make_samples: MakeSamples, make_trainer: MakeTrainer
) -> None:
    """A published folder has one more MoE layer, with a router of its own and no rows."""
    plain = write_family(tmp_path / "plain", "deepseek_v3")
    published = Path(shutil.copytree(plain, tmp_path / "published"))
    tensors = load_file(published / "model.safetensors")
    last = {name: t for name, t in tensors.items() if name.startswith("model.layers.2.")}
    tensors |= {name.replace("layers.2.", "layers.3."): t.clone() for name, t in last.items()}
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(64, 128)
    save_file(tensors, published / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((published / "config.json").read_text())
    settings["num_nextn_predict_layers"] = 1
    (published / "config.json").write_text(json.dumps(settings))
    samples = make_samples(LENGTHS, folder=plain)
    ours, expected = make_trainer(published), make_trainer(plain)
    assert ours.row_layout == expected.row_layout
    assert ours.step(samples) == expected.step(samples)
    weights, reference = ours.publish_weights(), expected.publish_weights()
    assert weights.keys() == reference.keys()
    assert all(torch.equal(tensor, reference[name]) for name, tensor in weights.items())


@pytest.mark.parametrize(
    ("moe_layers", "stage", "wanted"),
    [
        ((1, 2, 3), (1,), [1]),  # dense layer 0; layers 0-1 on the first stage
        ((1, 2, 3), (2, 3), [2, 3]),
        ((0, 2), (0,), [0]),  # every second layer dense
        ((0, 2), (2,), [2]),
        ((2, 3), (2, 3), [2, 3]),
    ],
)
@pytest.mark.parametrize("width", ["all layers", "moe layers"])
def test_a_stage_reads_the_rows_of_its_own_global_layers(
    moe_layers: tuple[int, ...], stage: tuple[int, ...], wanted: list[int], width: str
) -> None:
    """Rows hold the number of their layer, whether the engine sent dense layers or not."""
    layout = RowLayout(num_hidden_layers=4, moe_layers=moe_layers, num_experts=8, moe_top_k=2)
    numbers = range(4) if width == "all layers" else moe_layers
    sent = np.array([[[layer, layer + 4] for layer in numbers]] * 5, np.int32)
    ids = np.arange(6, dtype=np.int32)
    sample = TrainSample(
        sample_id="s",
        token_ids=ids,
        loss_mask=ids > 2,
        rollout_logprobs=np.zeros(6, np.float32),
        advantages=np.zeros(6, np.float32),
        weight_versions=(0,),
        routed_experts=ArrayRows(layout, ids, layout.canonical(sent)),
    )
    batch = lay_out([sample], [0], index=0, layout=layout, layers=stage)
    assert batch.rows[:, :, 0, 0].tolist() == [[layer] * 5 for layer in wanted]
    assert bool(batch.present.all())
