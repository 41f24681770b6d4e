"""Tasks and environments of a configuration: one plain dict entry for each kind of task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agent_rl.config import AgentConfig, RunConfig, TasksConfig
from envs.action_grammar import TOOL_SPECS, ActionGrammar
from envs.actions import FORMATS, Prompts, load_prompts
from envs.base import Env, Task
from envs.case_runner import CaseRunner
from envs.memo_runner import MemoRunner
from envs.sandbox.choose import choose
from envs.sandbox.launch import SandboxSpec
from envs.sandbox.limits import SandboxLimits
from envs.sandbox.pool import SandboxPool
from envs.swe import SweEnv
from envs.tasks import repair


@dataclass(frozen=True)
class TaskSets:
    """Disjoint tasks to train on and to measure on."""

    train: Sequence[Task]
    heldout: Sequence[Task]


def _as_they_are(tasks: Sequence[Task]) -> Sequence[Task]:
    return tasks


@dataclass(frozen=True)
class Environments:
    """Makes environments; owns the sandboxes that they share.

    ``admit`` gives those of some tasks that may be used, in order: what has to be fetched, made or
    shown to be solvable is, which may take long. Tasks go through it before ``make``.
    """

    make: Callable[[Task], Env]
    begin_batch: Callable[[], None]  # what may be shared between episodes ends here
    close: Callable[[], None]
    sandbox_kind: str
    admit: Callable[[Sequence[Task]], Sequence[Task]] = _as_they_are


def load_tasks(config: TasksConfig) -> TaskSets:
    """The tasks that ``config`` names; they need ``Environments.admit`` before use."""
    return TASK_SOURCES[config.kind](config)


def open_environments(config: RunConfig) -> Environments:
    """What plays the tasks of ``config``; close it."""
    return ENVIRONMENTS[config.tasks.kind](config)


def episode_prompts(config: RunConfig, issue: str = "") -> Prompts:
    """System and user prompt of an episode for models with a chat template."""
    if config.tasks.kind == "module":
        from agent_rl.own_tasks import own_prompts

        return own_prompts(config.tasks.module)(config, issue)
    if config.tasks.kind == "repair":
        tools, workspace = TOOL_SPECS, "the work folder"
    else:
        from agent_rl.image_environments import WORKSPACE, tools_of

        tools, workspace = tools_of(config.agent), WORKSPACE
    action_format = FORMATS[config.agent.action_format]()
    values = {"tools": action_format.describe(tools), "workspace": workspace, "issue": issue}
    return load_prompts(config.agent.prompts).fill(values)


def _repair_tasks(config: TasksConfig) -> TaskSets:
    train = repair.take(config.seed, "train", config.num_train, config.bugs)
    heldout = repair.take(config.seed, config.heldout_split, config.num_heldout, config.bugs)
    return TaskSets([task.to_task() for task in train], [task.to_task() for task in heldout])


def _repair_environments(config: RunConfig) -> Environments:
    settings = config.sandbox
    limits = SandboxLimits(
        memory_bytes=settings.memory_bytes,
        max_processes=settings.max_processes,
        max_file_bytes=settings.max_file_bytes,
        cpu_s=settings.cpu_s,
    )
    spec = choose(SandboxSpec(settings.kind, limits), allow_unsafe=settings.allow_unsafe)
    pool = SandboxPool(spec, settings.num_workers)
    pool.warm_up()
    cases = CaseRunner(
        pool, timeout_s=settings.timeout_s, output_cap_bytes=settings.output_cap_bytes
    )
    shared = MemoRunner(cases)
    runner = shared if settings.share_identical_runs else cases
    grammar = _repair_grammar(config.agent)
    return Environments(
        lambda task: SweEnv(task, runner, grammar=grammar), shared.clear, pool.close, spec.kind
    )


def _repair_grammar(agent: AgentConfig) -> ActionGrammar | None:
    """Function calls for models with a chat template; None is the compact grammar."""
    if agent.renderer == "compact":
        return None
    return ActionGrammar(FORMATS[agent.action_format]())


def _own_tasks(config: TasksConfig) -> TaskSets:
    from agent_rl.own_tasks import own_tasks

    return own_tasks(config.module).load_tasks(config)


def _own_environments(config: RunConfig) -> Environments:
    from agent_rl.own_tasks import own_tasks

    return own_tasks(config.tasks.module).open_environments(config)


def _row_tasks(config: TasksConfig) -> TaskSets:
    from agent_rl.image_environments import load_row_tasks

    return load_row_tasks(config)


def _image_environments(config: RunConfig) -> Environments:
    from agent_rl.image_environments import open_image_environments

    return open_image_environments(config)


TASK_SOURCES: dict[str, Callable[[TasksConfig], TaskSets]] = {
    "repair": _repair_tasks,
    "r2e_gym": _row_tasks,
    "swebench": _row_tasks,
    "module": _own_tasks,
}
ENVIRONMENTS: dict[str, Callable[[RunConfig], Environments]] = {
    "repair": _repair_environments,
    "r2e_gym": _image_environments,
    "swebench": _image_environments,
    "module": _own_environments,
}
