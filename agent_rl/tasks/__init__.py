"""What a run plays. A module of your own imports ``Environments`` and ``TaskSets`` from here."""

from agent_rl.tasks.base import Environments, TaskKind, TaskSets

__all__ = ["Environments", "TaskKind", "TaskSets"]
