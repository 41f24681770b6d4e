"""Dynamic sampling: replace groups that teach nothing by groups of other tasks, within bounds.

DAPO (arXiv 2503.14476, 3.2 and eq. 11) samples until the batch is full of groups that are neither
all right nor all wrong: here, whose rewards differ, before length costs anything. A policy that
solves all or nothing would sample for ever, so the rounds are bounded; what was sampled and dropped
is still reported, and a resumed run asks the same tasks again. verl bounds the rounds too, at 10 in
its DAPO settings, and ends the run there; here the step trains on what it has.

With or without it a group without signal is not trained on, and the loss is a mean over the others
alone. GRPO's ``1/G Σ`` and the peers without such a filter keep it in the divisor: where few groups
have signal, their step is smaller than one here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from agent_rl.config.objective import objective
from agent_rl.config.schema import RunConfig
from agent_rl.rollout.samples import has_signal
from agent_rl.tasks.curriculum import Curriculum
from agent_rl.types import Group, release_rows
from envs.base import Task


class Collector(Protocol):
    """Rolls out ``group_size`` trajectories per task, all with the engine's current weights.

    ``first_group`` numbers the groups where a step collects more than once.
    """

    async def __call__(
        self, tasks: Sequence[Task], step: int, first_group: int = 0
    ) -> list[Group]: ...


async def collect_groups(
    collect: Collector, curriculum: Curriculum[Task], config: RunConfig, step: int
) -> list[Group]:
    """Collect a step's groups; under dynamic sampling, one more for each that has no signal.

    Every round asks as many further tasks as groups with signal are lacking, at most
    ``algorithm.dynamic_sampling_rounds`` times.
    """
    groups = await collect(curriculum.at(step), step)
    wanted, asked = len(groups), 0
    is_complete = False
    try:
        for _ in range(objective(config.algorithm).dynamic_sampling_rounds):
            useful = sum(has_signal(g, config.rollout.min_valid_members) for g in groups)
            tasks = curriculum.further(step, asked, wanted - useful)
            if not tasks:
                break
            asked += len(tasks)
            groups += await collect(tasks, step, len(groups))
        is_complete = True
    finally:
        if not is_complete:  # cancelled or failed: nobody will take the earlier rounds' groups
            release_rows(groups)
    return groups
