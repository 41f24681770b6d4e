"""Tasks and environments from a module of the user's (``tasks.kind=module``).

The module is named by ``tasks.module``: importable (``my_package.tasks``) or a file (``tasks.py``).
It is a ``TaskKind``. ``docs/own_environment.md`` has a whole one.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType

from agent_rl.config.schema import RunConfig
from agent_rl.errors import ConfigError
from agent_rl.tasks.task_kind import Environments, TaskKind, TaskSets
from envs.actions import Prompts

_NEEDED = ("load_tasks", "open_environments")


@dataclass(frozen=True)
class _OwnTasks:
    """The functions of a user's module, as a ``TaskKind``."""

    load_tasks: Callable[..., TaskSets]
    open_environments: Callable[..., Environments]
    episode_prompts: Callable[..., Prompts]


def own_tasks(name: str) -> TaskKind:
    """Load the module of ``tasks.module``.

    Raises ConfigError when it is absent or lacks a function; ``episode_prompts`` is missed only
    when a chat template asks for it.
    """
    module = _checked(name)
    prompts = getattr(module, "episode_prompts", partial(_no_prompts, name))
    return _OwnTasks(module.load_tasks, module.open_environments, prompts)


def _no_prompts(name: str, config: RunConfig, issue: str = "") -> Prompts:
    raise ConfigError([f"tasks.module: {name} lacks episode_prompts, which a chat template needs"])


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
