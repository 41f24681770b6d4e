"""``transformer_engine.pytorch.distributed``: what Megatron derives from or calls."""

from torch.utils.checkpoint import checkpoint

__all__ = ["CudaRNGStatesTracker", "activation_recompute_forward", "checkpoint"]


class CudaRNGStatesTracker:
    """Base of a class that Megatron derives; nothing draws random numbers here."""


def activation_recompute_forward(*args: object, **kwargs: object) -> None:
    """Imported by name only: fp8 recompute is not used here."""
