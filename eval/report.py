"""The findings of an evaluation: counts that add up, rates with their uncertainty, costs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from agent_rl.metrics.intervals import wilson
from agent_rl.store.run_folder import write_aside
from agent_rl.types import Status
from agent_rl.view.record import EpisodeRecord
from envs.tasks.swebench import SweBenchRow
from eval.outcomes import Counts, Outcome
from eval.verdicts import Grade


@dataclass(frozen=True)
class Result:
    """One sample of one instance. Costs are 0 where the prediction was made elsewhere."""

    instance_id: str
    repo: str
    sample: int
    outcome: Outcome
    reason: str = ""
    stop_reason: str = ""
    turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class RepositoryLine:
    """One repository's part: instances, and the mean share of their samples that resolved."""

    repo: str
    num_instances: int
    resolved: float
    counts: Counts


@dataclass(frozen=True)
class Report:
    """The results of a run. The denominator of every rate is what was asked for."""

    name: str
    model: str
    dataset: str
    harness: str
    num_instances: int
    num_samples: int
    results: tuple[Result, ...] = field(repr=False)

    @property
    def counts(self) -> Counts:
        return Counts.of(result.outcome for result in self.results)

    @property
    def pass_at_1(self) -> float:
        """Mean over instances of the share of their samples that resolved."""
        return self.counts.resolved / len(self.results) if self.results else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval of Pass@1. Samples of one instance are not independent, so each
        instance counts as one trial."""
        return wilson(self.pass_at_1 * self.num_instances, self.num_instances)

    def pass_at(self, k: int) -> float:
        """Estimate pass@k without bias, over ``num_samples`` tries: mean of
        ``1 - C(n-c, k) / C(n, k)`` (Chen et al. 2021, arXiv 2107.03374).

        Raises ValueError for k above the tries made.
        """
        n = self.num_samples
        if not 1 <= k <= n:
            raise ValueError(f"pass@k needs k of 1 to {n} samples: got={k}")
        solved = [
            sum(r.outcome is Outcome.RESOLVED for r in results)
            for results in self._by_instance().values()
        ]
        scores = [1 - math.comb(n - c, k) / math.comb(n, k) for c in solved]
        return sum(scores) / len(scores) if scores else 0.0

    def repositories(self) -> list[RepositoryLine]:
        groups: dict[str, list[Result]] = {}
        for result in self.results:
            groups.setdefault(result.repo, []).append(result)
        lines: list[RepositoryLine] = []
        for repo, results in sorted(groups.items()):
            counts = Counts.of(result.outcome for result in results)
            num_instances = len({result.instance_id for result in results})
            share = counts.resolved / len(results)
            lines.append(RepositoryLine(repo, num_instances, share * num_instances, counts))
        return lines

    def means(self) -> dict[str, float]:
        """Return the mean turns, tokens and seconds of the episodes that were played here."""
        played = [result for result in self.results if result.stop_reason]
        size = max(1, len(played))
        keys = ("turns", "prompt_tokens", "completion_tokens", "seconds")
        return {key: sum(float(getattr(r, key)) for r in played) / size for key in keys}

    def _by_instance(self) -> Mapping[str, list[Result]]:
        groups: dict[str, list[Result]] = {}
        for result in self.results:
            groups.setdefault(result.instance_id, []).append(result)
        return groups

    def to_json(self) -> str:
        low, high = self.interval
        content = {
            "name": self.name,
            "model": self.model,
            "dataset": self.dataset,
            "harness": self.harness,
            "num_instances": self.num_instances,
            "num_samples": self.num_samples,
            "asked_for": len(self.results),
            "counts": {str(k): v for k, v in self.counts.by_outcome.items()},
            "pass_at_1": self.pass_at_1,
            "pass_at_1_interval_95": [low, high],
            "pass_at_k": {str(k): self.pass_at(k) for k in range(1, self.num_samples + 1)},
            "means": self.means(),
            "repositories": [
                {"repo": line.repo, "instances": line.num_instances, "resolved": line.resolved}
                for line in self.repositories()
            ],
            "results": [asdict(result) for result in self.results],
        }
        return json.dumps(content, indent=1)

    def save(self, file: Path) -> None:
        write_aside(file, self.to_json().encode("utf-8", "surrogateescape"))


def make_result(
    row: SweBenchRow, sample: int, record: EpisodeRecord | None, grade: Grade | None
) -> Result:
    """Give a sample its one outcome: by its grade, else by what happened to its episode."""
    if grade is not None:
        outcome, reason = grade.outcome, grade.reason
    elif record is not None and record.status == Status.FAILED:
        outcome, reason = Outcome.INFRASTRUCTURE, record.error
    else:
        outcome, reason = Outcome.NOT_RUN, "" if record is None else "not graded yet"
    base = Result(row.instance_id, row.repo, sample, outcome, reason)
    if record is None:
        return base
    return Result(
        **{
            **vars(base),
            "stop_reason": record.stop_reason,
            "turns": len(record.turns),
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": record.completion_tokens,
            "seconds": record.seconds,
        }
    )


def check_sum(report: Report) -> None:
    """Raise AssertionError unless every sample of every instance has exactly one outcome."""
    keys: Sequence[tuple[str, int]] = [(r.instance_id, r.sample) for r in report.results]
    asked = report.num_instances * report.num_samples
    if len(set(keys)) != len(keys) or len(keys) != asked or report.counts.total != asked:
        raise AssertionError(f"outcomes do not add up: got={len(keys)} expected={asked}")
