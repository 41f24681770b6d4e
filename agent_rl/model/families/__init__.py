"""Model families: which ``config.json`` the trainer covers, and what it makes of it.

A family is one file with one function from the fields of ``config.json`` to a ``ModelShape``; it
refuses what the Megatron model would compute differently instead of training something else.
To add one: write the file, list it here, add a tiny random version to
``tests/shared/family_policies.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from agent_rl.errors import ConfigError
from agent_rl.model.families import deepseek_v3, glm4_moe, mixtral, qwen2_moe, qwen3_moe
from agent_rl.model.families.fields import Fields
from agent_rl.model.shape import HFNames, ModelShape

# By the ``model_type`` of a Hugging Face configuration.
FAMILIES: dict[str, Callable[[Fields], ModelShape]] = {
    "deepseek_v3": deepseek_v3.shape,
    "glm4_moe": glm4_moe.shape,
    "mixtral": mixtral.shape,
    "qwen2_moe": qwen2_moe.shape,
    "qwen3_moe": qwen3_moe.shape,
}


def read_shape(folder: Path) -> ModelShape:
    """The shape of a model folder. Raises ``ConfigError`` naming all that is not covered."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError([f"policy.path: no config.json, got={folder} expected=a model folder"])
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError([f"{path}: not JSON ({error})"]) from error
    kind = raw.get("model_type")
    if kind not in FAMILIES:
        raise ConfigError(
            [
                f"{path}: model_type not covered, got={kind!r} expected=one of {sorted(FAMILIES)}; "
                "CONTRIBUTING.md says how to add a family"
            ]
        )
    fields = Fields(raw)
    shape = FAMILIES[kind](fields)
    if fields.problems:
        raise ConfigError([f"{path}: {problem}" for problem in dict.fromkeys(fields.problems)])
    return shape


def folder_names(folder: Path) -> HFNames:
    """What the tensors of a model folder are called; Qwen's names for a family not covered."""
    try:
        return read_shape(folder).names
    except ConfigError:
        return HFNames()
