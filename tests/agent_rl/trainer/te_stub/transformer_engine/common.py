"""``transformer_engine.common.recipe``."""

from types import SimpleNamespace


class DelayedScaling:
    """Base of a class that Megatron derives; fp8 is not used here."""


recipe = SimpleNamespace(DelayedScaling=DelayedScaling)
