"""The protocol of a kind of task: disjoint sets of tasks, and the maker of their environments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from agent_rl.config.schema import RunConfig, TasksConfig
from envs.actions import FORMATS, Prompts, ToolSpec, load_prompts
from envs.base import Env, Task


@dataclass(frozen=True)
class TaskSets:
    """Disjoint tasks to train on and to measure on."""

    train: Sequence[Task]
    heldout: Sequence[Task]


def _as_they_are(tasks: Sequence[Task]) -> Sequence[Task]:
    return tasks


@dataclass(frozen=True)
class Environments:
    """A maker of environments; owns the sandboxes that they share.

    ``admit`` returns the usable ones of some tasks, in their order. It fetches, prepares and
    validates what they need, which may take long. Tasks go through it before ``make``.
    """

    make: Callable[[Task], Env]
    begin_batch: Callable[[], None]  # what may be shared between episodes ends here
    close: Callable[[], None]
    sandbox_kind: str
    admit: Callable[[Sequence[Task]], Sequence[Task]] = _as_they_are


class TaskKind(Protocol):
    """One kind of task: a module with these functions. Importing it starts nothing."""

    def load_tasks(self, config: TasksConfig) -> TaskSets:
        """Return the tasks that ``config`` names; the same ones for the same ``config``."""
        ...

    def open_environments(self, config: RunConfig) -> Environments:
        """Start what plays the tasks, such as sandboxes; the caller closes it."""
        ...

    def episode_prompts(self, config: RunConfig, issue: str = "") -> Prompts:
        """Return system and user prompt of an episode for models with a chat template."""
        ...


def tool_prompts(
    config: RunConfig, issue: str, tools: Sequence[ToolSpec], workspace: str
) -> Prompts:
    """Fill the configured prompts with the description of ``tools`` and where they work."""
    action_format = FORMATS[config.agent.action_format]()
    values = {"tools": action_format.describe(tools), "workspace": workspace, "issue": issue}
    return load_prompts(config.agent.prompts).fill(values)
