"""The model families that the trainer covers.

A family is one file with one function from the fields of ``config.json`` to a ``ModelShape``; it
refuses what the Megatron model would compute differently instead of training something else.
To add one: write the file, list it here, add a tiny random version to
``tests/shared/family_policies.py``.
"""

from __future__ import annotations

from collections.abc import Callable

from agent_rl.model.families import deepseek_v3, glm4_moe, mixtral, qwen2_moe, qwen3_moe
from agent_rl.model.families.fields import Fields
from agent_rl.model.shape import ModelShape

# By the ``model_type`` of a Hugging Face configuration.
FAMILIES: dict[str, Callable[[Fields], ModelShape]] = {
    "deepseek_v3": deepseek_v3.shape,
    "glm4_moe": glm4_moe.shape,
    "mixtral": mixtral.shape,
    "qwen2_moe": qwen2_moe.shape,
    "qwen3_moe": qwen3_moe.shape,
}
