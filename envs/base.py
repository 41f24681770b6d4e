"""The parts of an environment: task, observation, score, and the protocols of sandbox and episode.

Everything is synchronous and blocking; the agent calls it from executor threads. One ``Env`` is
used by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

DEFAULT_PROTECTED: tuple[str, ...] = (
    "tests/*",
    "test/*",
    "test_*.py",
    "*/test_*.py",
    "*_test.py",
    "conftest.py",
    "*/conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "setup.cfg",
    "setup.py",
    "pyproject.toml",
    "tox.ini",
    ".coveragerc",
    "sitecustomize.py",
    "*/sitecustomize.py",
    "usercustomize.py",
    "*/usercustomize.py",
    "*.pth",
)
"""Paths that a source patch may never change: tests, runner configuration, start-up hooks."""


@dataclass(frozen=True)
class Task:
    """One problem: a repository, an issue, and the tests that decide.

    ``expected`` maps a test's full name to the status it must have at grading, for example
    ``{"tests/test_hidden.py::test_3": "PASSED"}``.
    """

    task_id: str
    issue: str
    files: Mapping[str, bytes]  # the repository at the base commit: relative posix path -> content
    focus_path: str  # the file that the compact grammar views and edits
    visible_tests: tuple[str, ...]  # test files that the agent may run
    hidden_files: Mapping[str, bytes]  # hidden test files, present in the grading sandbox only
    expected: Mapping[str, str]
    solution: bytes  # gold patch (unified diff), for validation only, never shown
    protected: tuple[str, ...] = DEFAULT_PROTECTED  # globs over the whole path; ``*`` spans folders
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Observation:
    """The reply to an action. ``malformed`` marks an action that nobody could read."""

    text: str
    done: bool = False
    stop_reason: str = ""
    malformed: bool = False


@dataclass(frozen=True)
class Score:
    """The verdict on one patch. ``reward`` is None exactly when ``status`` is infrastructure."""

    reward: float | None
    status: Literal["graded", "infrastructure"]
    reason: str
    passed: int = 0
    failed: int = 0
    protected_touched: tuple[str, ...] = ()
    test_log: bytes = b""


@dataclass(frozen=True)
class ExecResult:
    """The outcome of one command.

    ``output`` is stdout and stderr as they came, bytes kept as they are. When more than the cap
    was written, the first and the last part are kept with a marker between them and
    ``truncated`` is True. ``exit_code`` is None when the command was killed at a deadline, and
    128 + the signal's number when a signal ended it.
    """

    exit_code: int | None
    output: bytes
    truncated: bool = False
    timed_out: bool = False  # the wall-clock deadline passed
    cpu_exceeded: bool = False  # the CPU budget was used up
    oom: bool = False  # the memory cgroup killed something; False where there is no cgroup
    seconds: float = 0.0
    report: bytes = b""  # what was written to the report descriptor, if one was asked for


class Sandbox(Protocol):
    """A place for untrusted code with a work folder that lives as long as the sandbox.

    Each ``exec`` is a process tree of its own: when the call returns, nothing of it is left
    running, whether it ended, was killed at the deadline or left daemons behind.
    """

    @property
    def workspace(self) -> str:
        """Absolute path of the work folder as seen from inside."""
        ...

    def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        output_cap_bytes: int = 64 << 10,
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> ExecResult:
        """Run a command. ``cwd`` is relative to the work folder. Raises InfrastructureError."""
        ...

    def read(self, path: str) -> bytes:
        """Return the content of a plain file below the work folder.

        Raises WorkspaceError when it is absent, not a plain file, or leads outside.
        """
        ...

    def write(self, path: str, data: bytes) -> None:
        """Create or replace a plain file, with its folders. Raises WorkspaceError."""
        ...

    def delete(self, path: str) -> None:
        """Remove a plain file or link below the work folder. Raises WorkspaceError."""
        ...

    def snapshot(self) -> dict[str, bytes]:
        """Return every plain file below the work folder.

        Links, sockets and ``.git`` are left out.
        """
        ...

    def kill_all(self) -> None:
        """Kill whatever still runs inside; from another thread it ends an ``exec`` in progress."""
        ...

    def close(self) -> None:
        """Release everything. Idempotent."""
        ...


class Env(Protocol):
    """One episode on one task. The limit on turns is the agent loop's, not the environment's."""

    @property
    def task(self) -> Task: ...

    def reset(self) -> Observation:
        """Start over from the base commit; the observation is the issue."""
        ...

    def step(self, action: str) -> Observation:
        """Carry out one action. Raises EpisodeError after the end, InfrastructureError."""
        ...

    def grade(self) -> Score:
        """Judge the current patch in a fresh sandbox. Never raises for infrastructure trouble."""
        ...

    def patch(self) -> bytes:
        """Return the unified diff from the base commit to the current work tree, bytes exact."""
        ...

    def close(self) -> None: ...
