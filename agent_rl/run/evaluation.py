"""Measuring a policy on held-out tasks, with the same agent, sandbox and grading as training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent_rl.metrics.rollout_metrics import resolve_rate
from agent_rl.metrics.summary import Evaluation
from agent_rl.run.parts import Rollout, collect_heldout
from agent_rl.types import Group, Trajectory, release_rows
from envs.base import Task


async def evaluate(
    rollout: Rollout,
    heldout: Sequence[Task],
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Resolve rate of the engine's current weights on ``heldout``."""
    groups = await collect_heldout(rollout, heldout, on_progress)
    families = {task.task_id: task.metadata.get("family", "all") for task in heldout}
    result = summarize_evaluation(groups, families)
    release_rows(groups)
    return result


def summarize_evaluation(groups: Sequence[Group], families: Mapping[str, str]) -> Evaluation:
    """Rates over judged trajectories; the ones that infrastructure failed are counted apart."""
    everyone = [t for group in groups for t in group.trajectories]
    judged = [t for t in everyone if t.is_valid]
    by_family: defaultdict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in judged:
        by_family[families[trajectory.task_id]].append(trajectory)
    return Evaluation(
        resolve_rate=resolve_rate(judged),
        num_trajectories=len(judged),
        num_infrastructure=len(everyone) - len(judged),
        by_family={
            name: (round(resolve_rate(members) * len(members)), len(members))
            for name, members in sorted(by_family.items())
        },
        turns_mean=sum(len(t.turns) for t in judged) / max(1, len(judged)),
    )


def evaluation_from_json(row: Mapping[str, Any]) -> Evaluation:
    """Read back what ``dataclasses.asdict`` of an ``Evaluation`` wrote."""
    families = {name: (counts[0], counts[1]) for name, counts in row["by_family"].items()}
    return Evaluation(**{**row, "by_family": families})
