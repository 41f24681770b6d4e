"""The transformers step computes what Megatron's computes; sizes and ratios are right."""

from dataclasses import replace
from pathlib import Path

import bench_fakes
import pytest

from agent_rl.bench.row_bytes import measure_row_bytes
from agent_rl.bench.row_check_cost import measure_row_check
from agent_rl.bench.trainer import Ratio, made_samples, micro_batches
from agent_rl.bench.transformers_step import EXPERTS, TransformersStep
from agent_rl.trainer.megatron import MegatronTrainer


@pytest.mark.parametrize("experts", EXPERTS)
def test_both_steps_move_the_weights_alike(tmp_path: Path, experts: str) -> None:
    """Two steps: the second loss depends on what the first did to every weight."""
    folder = bench_fakes.policy(tmp_path)
    config = bench_fakes.config()
    config = replace(config, optim=replace(config.optim, lr=1e-3))
    samples = [replace(s, routed_experts=None) for s in made_samples(config, folder)]
    batches = micro_batches(samples, config, folder)
    baseline = TransformersStep(folder, config, experts)
    trainer = MegatronTrainer(config, folder)
    for _ in range(2):
        ours, theirs = trainer.step(samples)["loss"], baseline.step(batches, (0.2, 0.28))
        assert ours == pytest.approx(theirs, abs=2e-5)
    trainer.close()


def test_a_ratio_is_taken_inside_a_round() -> None:
    ratio = Ratio.of([2.0, 20.0, 6.0], [1.0, 10.0, 2.0])
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 2.0, 2.5)


def test_both_checks_of_a_step_are_timed_in_every_round() -> None:
    above, below = measure_row_check(num_rounds=2, num_samples=2)
    assert len(above) == len(below) == 2
    assert min(*above, *below) > 0


def test_rows_are_held_once_and_narrow() -> None:
    """Held: the whole micro-batch, ids and values included. Peak: while it is laid out."""
    sizes = measure_row_bytes()
    packed, padded = sizes.routing_bytes_over_unique_packed, sizes.routing_bytes_over_unique
    assert 1 < packed < padded <= 1.1
    unique = sizes.long_sample_unique_bytes
    assert unique == 37_999 * 48 * 8
    assert unique < sizes.long_sample_held_bytes < 1.2 * unique
    assert sizes.long_sample_held_bytes < sizes.long_sample_peak_bytes < 3 * unique
    assert sizes.long_sample_stage_peak_bytes < sizes.long_sample_peak_bytes / 3
