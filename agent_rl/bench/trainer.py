"""The cost of a trainer's step: with replay against without, Megatron against transformers.

A random model of a size at which products outweigh Python, random samples, and its own live
routing as the rows: replay then computes exactly what no replay computes, and only its cost is
left. The three steps run in rounds. CPU seconds of the process decide; wall seconds are given
beside them and mean little on a loaded machine.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from transformers.utils import logging as hf_logging

from agent_rl.bench.random_steps import Report, Step, random_samples, step_config, time_rounds
from agent_rl.bench.row_bytes import ALIGNMENT, RowBytes, measure_row_bytes
from agent_rl.bench.row_check_cost import measure_row_check
from agent_rl.bench.transformers_step import EXPERTS, TransformersStep
from agent_rl.config.objective import objective
from agent_rl.config.schema import RunConfig, TrainerConfig
from agent_rl.model.config_json import read_shape
from agent_rl.model.random_policy import write_random_policy
from agent_rl.run.warmstart.train import TinyMoEShape
from agent_rl.trainer.assignment import plan_micro_batches
from agent_rl.trainer.batch import MicroBatch, fed_tokens, lay_out
from agent_rl.trainer.megatron import MegatronTrainer
from agent_rl.types import TrainSample

SHAPE = TinyMoEShape(
    hidden_size=256,
    num_layers=4,
    num_heads=4,
    head_dim=64,
    num_experts=32,
    moe_top_k=4,
    expert_width=128,
)
_LONGEST = 512
_NUM_SAMPLES = 8


@dataclass(frozen=True)
class Ratio:
    """Median and quartiles, over the rounds, of a ratio of two steps of one round."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, above: Sequence[float], below: Sequence[float]) -> Ratio:
        ratios = [a / b for a, b in zip(above, below, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return cls(middle, low, high)


@dataclass(frozen=True)
class TrainerBench:
    """The result; ``cpu`` ratios are of process CPU seconds, ``wall`` ones of elapsed time."""

    replay_over_off_cpu: Ratio
    replay_over_off_wall: Ratio
    megatron_over_transformers_cpu: Ratio
    megatron_over_transformers_wall: Ratio
    row_check_over_bare_cpu: Ratio  # rows of a step checked in the layout, over bare check_rows
    transformers_experts: str  # the faster one here
    num_rounds: int
    num_fed_tokens: int
    num_parameters: int
    row_bytes: RowBytes

    def to_json(self) -> dict[str, float | int | str]:
        """Return flat figures; the ratios named without a suffix are the CPU medians."""
        flat: dict[str, float | int | str] = {
            "replay_step_over_off": self.replay_over_off_cpu.median,
            "megatron_over_transformers": self.megatron_over_transformers_cpu.median,
            "row_check_over_bare": self.row_check_over_bare_cpu.median,
        }
        for name, value in vars(self).items():
            if isinstance(value, Ratio):
                flat |= {f"{name}_{part}": v for part, v in asdict(value).items()}
            elif isinstance(value, RowBytes):
                flat |= asdict(value)
            else:
                flat[name] = value
        return flat


def measure_trainer(*, num_rounds: int = 9, report: Report = lambda text: None) -> TrainerBench:
    """Time the three steps and the check of rows ``num_rounds`` times, and size the tables."""
    torch.set_num_threads(1)
    hf_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="bench-trainer-") as work:
        folder = write_random_policy(Path(work) / "policy", shape=SHAPE)
        config = bench_config("off")
        samples = made_samples(config, folder)
        batches = micro_batches(samples, config, folder)
        trainers = {
            "off": MegatronTrainer(config, folder),
            "r3": MegatronTrainer(bench_config("r3"), folder),
        }
        own = objective(config.algorithm)
        clip = (own.clip_low, own.clip_high)
        experts = _faster_experts(folder, config, batches, clip)
        baseline = TransformersStep(folder, config, experts)
        steps: dict[str, Step] = {
            "off": lambda: trainers["off"].step(samples),
            "r3": lambda: trainers["r3"].step(samples),
            "transformers": lambda: baseline.step(batches, clip),
        }
        report(f"{num_rounds} rounds of {', '.join(steps)}")
        cpu, wall = time_rounds(steps, num_rounds, report)
        for trainer in trainers.values():
            trainer.close()
        num_parameters = sum(p.numel() for p in trainers["off"].publish_weights().values())
    report("checking the rows of a step, and sizing its tables")
    return TrainerBench(
        replay_over_off_cpu=Ratio.of(cpu["r3"], cpu["off"]),
        replay_over_off_wall=Ratio.of(wall["r3"], wall["off"]),
        megatron_over_transformers_cpu=Ratio.of(cpu["off"], cpu["transformers"]),
        megatron_over_transformers_wall=Ratio.of(wall["off"], wall["transformers"]),
        row_check_over_bare_cpu=Ratio.of(*measure_row_check(num_rounds)),
        transformers_experts=experts,
        num_rounds=num_rounds,
        num_fed_tokens=sum(map(fed_tokens, samples)),
        num_parameters=num_parameters,
        row_bytes=measure_row_bytes(),
    )


def bench_config(replay: Literal["off", "r3"]) -> RunConfig:
    return step_config(replay, _LONGEST, TrainerConfig(micro_batch_tokens=4 * _LONGEST))


def made_samples(config: RunConfig, folder: Path, seed: int = 0) -> list[TrainSample]:
    """Draw samples of random lengths, a third of their tokens trained."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3 * _LONGEST // 4, _LONGEST, _NUM_SAMPLES)
    trainer = MegatronTrainer(config, folder)
    samples = random_samples(trainer, read_shape(folder).vocab_size, lengths, rng, trained=1 / 3)
    trainer.close()
    return samples


def micro_batches(
    samples: Sequence[TrainSample], config: RunConfig, folder: Path
) -> list[MicroBatch]:
    """Return the micro-batches that the trainer makes of ``samples``."""
    trainer = MegatronTrainer(config, folder)
    layout = trainer.row_layout
    trainer.close()
    plan = plan_micro_batches(
        [fed_tokens(s) for s in samples],
        token_budget=config.trainer.micro_batch_tokens,
        alignment=ALIGNMENT,
    )[0]
    return [
        lay_out(samples, chosen, index=i, layout=layout, alignment=ALIGNMENT, use_rows=False)
        for i, chosen in enumerate(plan)
    ]


def _faster_experts(
    folder: Path, config: RunConfig, batches: Sequence[MicroBatch], clip: tuple[float, float]
) -> str:
    """Return the experts implementation with the lowest CPU time after a warm-up step."""
    spent = {}
    for experts in EXPERTS:
        step = TransformersStep(folder, config, experts)
        step.step(batches, clip)
        started = time.process_time()
        step.step(batches, clip)
        spent[experts] = time.process_time() - started
    return min(spent, key=lambda name: spent[name])
