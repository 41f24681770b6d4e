"""Tasks and environments from a module of the user's (``tasks.kind=module``).

The module is named by ``tasks.module``: importable (``my_package.tasks``) or a file (``tasks.py``).
It offers the functions of ``OwnTasks``. ``docs/own_environment.md`` has a whole one.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Protocol, cast

from agent_rl.config import RunConfig, TasksConfig
from agent_rl.environments import Environments, TaskSets
from agent_rl.errors import ConfigError
from envs.actions import Prompts

_NEEDED = ("load_tasks", "open_environments")


class OwnTasks(Protocol):
    """What a module must offer. Nothing is started by loading it."""

    def load_tasks(self, config: TasksConfig) -> TaskSets:
        """Disjoint tasks to train on and to measure on; the same for the same ``config``."""
        ...

    def open_environments(self, config: RunConfig) -> Environments:
        """What makes an ``envs.base.Env`` of each task; owns what they share, such as sandboxes."""
        ...


def own_tasks(name: str) -> OwnTasks:
    """The module of ``tasks.module``. Raises ConfigError when it is absent or lacks a function."""
    return cast(OwnTasks, _checked(name))


def own_prompts(name: str) -> Callable[[RunConfig, str], Prompts]:
    """The module's ``episode_prompts(config, issue)``, which chat templates need.

    Raises ConfigError.
    """
    found = getattr(_checked(name), "episode_prompts", None)
    if found is None:
        raise ConfigError(
            [f"tasks.module: {name} lacks episode_prompts, which a chat template needs"]
        )
    return found


def _checked(name: str) -> ModuleType:
    module = _from_file(Path(name).resolve()) if name.endswith(".py") else _by_name(name)
    missing = [function for function in _NEEDED if not hasattr(module, function)]
    if missing:
        raise ConfigError([f"tasks.module: {name} lacks {' and '.join(missing)}"])
    return module


def _by_name(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            [
                f"tasks.module: got {name!r}, which cannot be imported ({error}); expected an "
                "installed module, one on PYTHONPATH, or a path that ends in .py"
            ]
        ) from error


@cache  # a second run of the file would make classes that are not those of the first
def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError([f"tasks.module: got {str(path)!r}, which is no file"])
    name = f"own_tasks_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # a .py file always has a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
