"""A kept bug with everything that its rows are written from."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from envs.base import DEFAULT_PROTECTED, Task
from envs.grading.suite import TestStatus
from envs.patches.diff import diff_trees
from envs.tasks.from_repository.repository import Repository


@dataclass(frozen=True)
class MadeTask:
    """One bug in ``path``.

    ``failing`` are the tests that notice it; the files that hold them are hidden from the agent.
    ``expected`` are all tests of the files in use, with their statuses."""

    repository: Repository
    path: str
    content: bytes
    kind: str
    function: str
    line: int
    failing: tuple[str, ...]
    expected: Mapping[str, TestStatus]
    issue: str

    @property
    def task_id(self) -> str:
        digest = hashlib.sha256(self.path.encode() + b"\0" + self.content).hexdigest()[:12]
        return f"local__{self.repository.name}-{digest}"

    @property
    def hidden(self) -> tuple[str, ...]:
        """Test files that the agent does not get."""
        return tuple(sorted({test.partition("::")[0] for test in self.failing}))

    @cached_property
    def base_files(self) -> dict[str, bytes]:
        """The files that the agent gets: the bug is in, the hidden tests are out."""
        files = {p: data for p, data in self.repository.files.items() if p not in self.hidden}
        return {**files, self.path: self.content}

    @cached_property
    def solution(self) -> bytes:
        fixed = {**self.base_files, self.path: self.repository.files[self.path]}
        return diff_trees(self.base_files, fixed).patch

    @cached_property
    def test_patch(self) -> bytes:
        """The patch that adds the hidden tests."""
        hidden = {path: self.repository.files[path] for path in self.hidden}
        return diff_trees(self.base_files, {**self.base_files, **hidden}).patch

    def to_task(self) -> Task:
        """Return a task for sandboxes without images.

        Run by ``PytestRunner`` with ``import_folders``.
        """
        visible = sorted({name.partition("::")[0] for name in self.expected} - {*self.hidden})
        return Task(
            task_id=self.task_id,
            issue=self.issue,
            files=self.base_files,
            focus_path=self.path,
            visible_tests=tuple(visible),
            hidden_files={path: self.repository.files[path] for path in self.hidden},
            expected=dict(self.expected),
            solution=self.solution,
            protected=(*DEFAULT_PROTECTED, *self.repository.test_support),
            metadata={
                "test_runner": "pytest",
                "import_folders": ":".join(self.repository.import_folders),
                "repository": self.repository.name,
                "bug_kind": self.kind,
                "function": self.function,
            },
        )
