"""A task in an image: its files, those hidden from the agent, and the tests that decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from envs.base import DEFAULT_PROTECTED, Task

# Beyond the tests and the runner's files: interpreters, tools and git's own settings.
IMAGE_PROTECTED: tuple[str, ...] = (
    *DEFAULT_PROTECTED,
    "*_test.py",
    "test_*.py",
    "conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "setup.cfg",
    "pyproject.toml",
    "tox.ini",
    "noxfile.py",
    "sitecustomize.py",
    "usercustomize.py",
    ".coveragerc",
    "*.pth",
    ".git/*",
    "*/.git/*",
    ".venv/*",
    "r2e_tests",
    "r2e_tests/*",
    "tests",
    "test",
    "*/tests/*",
    "*/test/*",
    "run_tests.sh",
    "manage.py",
    "runtests.py",
    "*/runtests.py",
    "bin/*",
    "*.so",
    "*.pyc",
)

NameStyle = Literal["node_id", "r2e"]


@dataclass(frozen=True)
class TestPlan:
    """The way to run the official tests in a fresh container of the task's image.

    ``files`` are official test files to put in place (absolute path -> content) over what the image
    has. ``judged_paths`` are the folders or files that hold the tests; a control run rewrites them.
    ``names`` says how expected names are spelt: pytest's node ids, or R2E-Gym's ``Class.test``.
    """

    __test__ = False

    command: tuple[str, ...]
    judged_paths: tuple[str, ...]
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    links: Mapping[str, str] = field(default_factory=dict[str, str])  # link -> target, absolute
    names: NameStyle = "node_id"
    timeout_s: float = 300.0
    plugin: bool = True  # the command runs pytest, which can report outcomes by itself
    environment: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class ImageTask(Task):
    """A ``Task`` whose files are in ``image`` at ``repository``; ``Task.files`` is empty.

    ``hidden_paths`` (absolute) are removed before the agent starts. ``fix_ids`` are commits that
    must not be readable. ``exact`` asks for the same set of test names, as R2E-Gym does; otherwise
    further tests may exist.
    """

    image: str = ""
    repository: str = "/testbed"
    base: str = "HEAD"
    hidden_paths: tuple[str, ...] = ()
    fix_ids: tuple[str, ...] = ()
    plan: TestPlan = field(default_factory=lambda: TestPlan((), ()))
    exact: bool = False
