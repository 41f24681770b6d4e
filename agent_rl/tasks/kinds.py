"""The kinds of task a run can play, one plain dict entry each.

An entry names a module that is a ``TaskKind``; it is imported when a run asks for it. Kinds of
rows whose tasks are in container images share one module and stand in its ``ROWS``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import cast

from agent_rl.config.schema import RunConfig, TasksConfig
from agent_rl.tasks.images import ROWS
from agent_rl.tasks.task_kind import Environments, TaskKind, TaskSets
from envs.actions import Prompts


def load_tasks(config: TasksConfig) -> TaskSets:
    """Return the tasks that ``config`` names; they need ``Environments.admit`` before use."""
    return KINDS[config.kind](config).load_tasks(config)


def open_environments(config: RunConfig) -> Environments:
    """Start what plays the tasks of ``config``; the caller closes it."""
    return KINDS[config.tasks.kind](config.tasks).open_environments(config)


def episode_prompts(config: RunConfig, issue: str = "") -> Prompts:
    """Return system and user prompt of an episode for models with a chat template."""
    return KINDS[config.tasks.kind](config.tasks).episode_prompts(config, issue)


def _shipped(module: str) -> Callable[[TasksConfig], TaskKind]:
    return lambda _: cast(TaskKind, import_module(f"agent_rl.tasks.{module}"))


def _own(config: TasksConfig) -> TaskKind:
    from agent_rl.tasks.module import own_tasks

    return own_tasks(config.module)


KINDS: dict[str, Callable[[TasksConfig], TaskKind]] = {
    "repair": _shipped("repair"),
    "module": _own,
    **dict.fromkeys(ROWS, _shipped("images")),
}
