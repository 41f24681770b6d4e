"""The time of a step with the next rollout beside the update, over one in turns.

Short runs from the same weights, one of each kind a round, in another order each round; a ratio is
taken inside a round. A run's first and last step do not count, nothing runs beside their ends.
Where engine and trainer share processors, as on one CPU machine, little can be gained: the bound is
the time that neither of them spends computing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from agent_rl.bench.trainer import Ratio
from agent_rl.config.schema import RunConfig
from agent_rl.loop import train_steps
from agent_rl.run.parts import assemble
from agent_rl.types import Group

Report = Callable[[str], None]


@dataclass(frozen=True)
class Run:
    """Medians over the inner steps of a run, in seconds."""

    step_s: float
    rollout_s: float
    train_s: float
    wait_s: float  # of the trainer, for a rollout


@dataclass(frozen=True)
class OverlapBench:
    """``beside_over_turns``: wall time of a step with overlap over one that takes turns."""

    beside_over_turns: Ratio
    best_possible: float  # the longer of rollout and update over their sum, taking turns
    turns: Run
    beside: Run
    num_rounds: int

    def to_json(self) -> dict[str, float]:
        """Flat, for a file."""
        return {
            "beside_over_turns": self.beside_over_turns.median,
            "beside_over_turns_low": self.beside_over_turns.low,
            "beside_over_turns_high": self.beside_over_turns.high,
            "best_possible": self.best_possible,
            "turns_step_s": self.turns.step_s,
            "turns_rollout_s": self.turns.rollout_s,
            "turns_train_s": self.turns.train_s,
            "beside_step_s": self.beside.step_s,
            "beside_rollout_s": self.beside.rollout_s,
            "beside_train_s": self.beside.train_s,
            "beside_wait_s": self.beside.wait_s,
            "num_rounds": self.num_rounds,
        }


async def measure_overlap(
    config: RunConfig, *, num_steps: int, num_rounds: int, report: Report
) -> OverlapBench:
    """Both kinds of run of ``num_steps`` (4 or more) steps, ``num_rounds`` (2 or more) times."""
    runs: dict[bool, list[Run]] = {False: [], True: []}
    for number in range(num_rounds):
        for overlap in (False, True) if number % 2 == 0 else (True, False):
            run = await _run(with_overlap(config, num_steps, overlap=overlap))
            runs[overlap].append(run)
            report(
                f"round {number + 1} of {num_rounds}, {'beside' if overlap else 'in turns'}: "
                f"{run.step_s:.2f} s per step"
                f" (rollout {run.rollout_s:.2f}, update {run.train_s:.2f})"
            )
    return summarize(runs[False], runs[True])


def with_overlap(config: RunConfig, num_steps: int, *, overlap: bool) -> RunConfig:
    """``config`` for a short run of one kind."""
    staleness = max(config.routing.max_staleness, int(overlap))
    return replace(
        config,
        train=replace(config.train, steps=num_steps, overlap_rollout=overlap, eval_every=0),
        routing=replace(config.routing, max_staleness=staleness),
    )


def summarize(turns: Sequence[Run], beside: Sequence[Run]) -> OverlapBench:
    """Ratios of runs of the same round."""
    ratio = Ratio.of([run.step_s for run in beside], [run.step_s for run in turns])
    apart = _middle(turns)
    return OverlapBench(
        beside_over_turns=ratio,
        best_possible=max(apart.rollout_s, apart.train_s) / (apart.rollout_s + apart.train_s),
        turns=apart,
        beside=_middle(beside),
        num_rounds=len(turns),
    )


class _Steps:
    """Observer of the loop that keeps the metrics."""

    def __init__(self) -> None:
        self.rows = list[dict[str, float]]()

    def step_done(self, step: int, groups: Sequence[Group], metrics: dict[str, float]) -> bool:
        self.rows.append(metrics)
        return False


async def _run(config: RunConfig) -> Run:
    parts, steps = assemble(config), _Steps()
    try:
        await train_steps(parts.loop, steps, first_step=1)
    finally:
        await parts.aclose()
    return _middle([_timed(row) for row in steps.rows[1:-1]])


def _timed(metrics: Mapping[str, float]) -> Run:
    """One step as a run of its own."""
    return Run(
        step_s=metrics["time_step_s"],
        rollout_s=metrics["time_generate_s"] + metrics["time_environment_s"],
        train_s=metrics["time_train_s"],
        wait_s=metrics["time_wait_rollout_s"],
    )


def _middle(runs: Sequence[Run]) -> Run:
    return Run(
        step_s=statistics.median(run.step_s for run in runs),
        rollout_s=statistics.median(run.rollout_s for run in runs),
        train_s=statistics.median(run.train_s for run in runs),
        wait_s=statistics.median(run.wait_s for run in runs),
    )
