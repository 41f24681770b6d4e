"""Tasks of a run. A module of your own imports ``Environments`` and ``TaskSets`` from here."""

from agent_rl.tasks.task_kind import Environments, TaskKind, TaskSets

__all__ = ["Environments", "TaskKind", "TaskSets"]
