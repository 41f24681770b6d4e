"""Functions that Megatron compiles with torch.compile, which fuses a few operations for a GPU.

All versions. On a CPU it would call a C++ compiler in the middle of a step, and fail where there is
none or where the environment's path has a space in it.
"""

from __future__ import annotations

import types

from agent_rl.trainer.cpu_backend.patches import Patches


def apply(module: types.ModuleType, patches: Patches) -> None:
    """Take torch.compile off the functions and methods of a module."""
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    for owner in (module, *(c for c in classes if c.__module__ == module.__name__)):
        for name, value in list(vars(owner).items()):
            if isinstance(value, types.FunctionType):  # not the mocks of absent packages
                original = getattr(value, "_torchdynamo_orig_callable", None)
                if original is not None:
                    patches.set(owner, name, original)
