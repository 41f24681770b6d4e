"""``transformer_engine.pytorch.float8_tensor``: a class that no tensor here is of."""


class Float8Tensor:
    """Asked for by ``isinstance`` only."""
