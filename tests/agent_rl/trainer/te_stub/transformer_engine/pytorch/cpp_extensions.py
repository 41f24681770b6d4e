"""``transformer_engine.pytorch.cpp_extensions``: imported by name only."""


def cast_to_fp8(*args: object) -> None:
    """fp8 is not used here."""
