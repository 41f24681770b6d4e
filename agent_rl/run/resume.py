"""The configuration and the tasks that a resumed run must share with its checkpoint.

A checkpoint holds the configuration that it was trained with, and a digest of its tasks. The
folder's ``config.yaml`` can be edited, rows and modules of tasks too, and checkpoints can be copied
between folders; a run that then goes on is not the one that was interrupted, and nothing else would
say so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from agent_rl.config.schema import RunConfig
from agent_rl.config.suggestions import command_line
from agent_rl.errors import CheckpointError
from agent_rl.tasks.digest import tasks_digest
from envs.base import Task

RECORD = "run.json"
TASKS = "tasks.json"

# How a run is carried out, not what it computes: another machine, another number of ranks.
MAY_CHANGE = re.compile(r"trainer\.(?!dtype$|kind$)\w+|train\.(save_every|keep_last|max_wall_s)")

_MEANING = {"train.steps": " (the learning rate now decays to the later end)"}
_PLACE = re.compile(r"name|run_root")  # the folder may have been moved
_TASKS = re.compile(r"seed|tasks\.\w+|algorithm\.groups_per_step")  # which are asked, and when


@dataclass(frozen=True)
class TaskRecord:
    """The features that tell the training tasks of a run from others."""

    num_tasks: int
    digest: str

    @classmethod
    def of(cls, tasks: Sequence[Task]) -> TaskRecord:
        """Read all of ``tasks``; half a second for 6,000 small ones."""
        return cls(len(tasks), tasks_digest(tasks))


def record_run(folder: Path, config: RunConfig, tasks: TaskRecord) -> None:
    """Write ``config`` and ``tasks`` into the checkpoint ``folder``."""
    for name, record in ((RECORD, config), (TASKS, tasks)):
        (folder / name).write_bytes(orjson.dumps(asdict(record), option=orjson.OPT_INDENT_2))


def require_same_tasks(folder: Path, tasks: TaskRecord) -> None:
    """Refuse to go on with other tasks than those that the checkpoint ``folder`` was trained on.

    Raises CheckpointError: a task more or less, another order, or other contents under the same
    names. A checkpoint without a record passes.
    """
    if not (folder / TASKS).is_file():
        return
    before = TaskRecord(**orjson.loads((folder / TASKS).read_bytes()))
    if tasks != before:
        again = command_line("agent-rl", "train", "--resume", folder.parents[1], "--other-tasks")
        raise CheckpointError(
            f"the training tasks are not those of {folder}: got={tasks.num_tasks} tasks with "
            f"digest {tasks.digest} expected={before.num_tasks} with {before.digest}; their rows, "
            " module or images have changed, or one was refused that was used before. Put "
            f"them back, or go on with those of now: {again}"
        )


def changes_since(folder: Path, config: RunConfig) -> list[str]:
    """Return one line for each key that ``config`` changes of the recorded one, to be told.

    Raises CheckpointError when it would ask other tasks than the uninterrupted run: another seed,
    other tasks. Empty for a checkpoint without a record.
    """
    if not (folder / RECORD).is_file():
        return []
    before = dict(leaves(orjson.loads((folder / RECORD).read_bytes())))
    now = dict(leaves(orjson.loads(orjson.dumps(asdict(config)))))
    if config.optim.decay == "constant":
        before.pop("train.steps", None)  # a longer run is the same one: no rate decays to its end
    changed = {
        key: f"{key}: got={now[key]!r} expected={value!r}{_MEANING.get(key, '')}"
        for key, value in before.items()  # keys that only one version of this package has are left
        if key in now and now[key] != value
        if not (MAY_CHANGE.fullmatch(key) or _PLACE.fullmatch(key))
    }
    if refused := [line for key, line in changed.items() if _TASKS.fullmatch(key)]:
        again = command_line("agent-rl", "train", "CONFIG", f"policy.path={folder}")
        raise CheckpointError(
            f"{folder} is of a run that asks other tasks: {'; '.join(refused)}. Put back what it "
            f"was trained with, or start a new run from its weights: {again}"
        )
    return list(changed.values())


def leaves(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Iterate over the values of nested mappings, each with its dotted key."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
