"""The tasks of each step: a function of seed and step alone, so a resume needs no state."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Curriculum(Generic[_T]):
    """A walk through shuffled epochs over ``tasks``, ``per_step`` at a time."""

    def __init__(self, tasks: Sequence[_T], per_step: int, seed: int) -> None:
        self._tasks, self._per_step, self._seed = tasks, per_step, seed
        self._epoch, self._order = -1, list[int]()

    @property
    def tasks(self) -> Sequence[_T]:
        """All tasks, in the order that the run's kind of task gives them."""
        return self._tasks

    def at(self, step: int) -> list[_T]:
        """Return the tasks of ``step`` (from 1). All are asked once before any is asked again."""
        first = (step - 1) * self._per_step
        return [self._tasks[self._index(p)] for p in range(first, first + self._per_step)]

    def further(self, step: int, skip: int, count: int) -> list[_T]:
        """Return ``count`` tasks beside those of ``step``, after ``skip`` of them.

        Their order is fixed per step; there are fewer where the tasks run out. They are drawn from
        all tasks, so an epoch may ask one of them again.
        """
        if count < 1:
            return []
        first = (step - 1) * self._per_step
        own = {self._index(p) for p in range(first, first + self._per_step)}
        others = [i for i in range(len(self._tasks)) if i not in own]
        random.Random(f"{self._seed}/further/{step}").shuffle(others)
        return [self._tasks[i] for i in others[skip : skip + count]]

    def _index(self, position: int) -> int:
        epoch, offset = divmod(position, len(self._tasks))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self._tasks)))
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
        return self._order[offset]
