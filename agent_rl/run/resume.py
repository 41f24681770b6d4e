"""The configuration that a resumed run must share with its checkpoint.

A checkpoint holds the configuration that it was trained with. The folder's ``config.yaml`` can be
edited and checkpoints can be copied between folders; a run that then goes on is not the one that
was interrupted, and nothing else would say so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import orjson

from agent_rl.config.schema import RunConfig
from agent_rl.config.suggestions import command_line
from agent_rl.errors import CheckpointError

RECORD = "run.json"

# How a run is carried out, not what it computes: another machine, another number of ranks.
MAY_CHANGE = re.compile(r"trainer\.(?!dtype$|kind$)\w+|train\.(save_every|keep_last|max_wall_s)")

_PLACE = re.compile(r"name|run_root")  # the folder may have been moved
_TASKS = re.compile(r"seed|tasks\.\w+|algorithm\.groups_per_step")  # which are asked, and when


def record_config(folder: Path, config: RunConfig) -> None:
    """Write ``config`` into the checkpoint ``folder``."""
    (folder / RECORD).write_bytes(orjson.dumps(asdict(config), option=orjson.OPT_INDENT_2))


def changes_since(folder: Path, config: RunConfig) -> list[str]:
    """Return one line for each key that ``config`` changes of the recorded one, to be told.

    Raises CheckpointError when it would ask other tasks than the uninterrupted run: another seed,
    other tasks. Empty for a checkpoint without a record.
    """
    if not (folder / RECORD).is_file():
        return []
    before = dict(_leaves(orjson.loads((folder / RECORD).read_bytes())))
    now = dict(_leaves(orjson.loads(orjson.dumps(asdict(config)))))
    changed = {
        key: f"{key}: got={now[key]!r} expected={value!r}"
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


def _leaves(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
