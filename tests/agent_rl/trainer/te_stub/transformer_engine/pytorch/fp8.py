"""``transformer_engine.pytorch.fp8``: off."""

import contextlib

fp8_autocast = fp8_model_init = contextlib.nullcontext


class FP8GlobalStateManager:
    @staticmethod
    def is_fp8_enabled() -> bool:
        return False
