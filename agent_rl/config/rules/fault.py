"""What a rule yields, and the rule about keys that nobody reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass

from agent_rl.config.schema import RunConfig

Fault = tuple[str, str]  # key, what is wrong
Rule = Callable[[RunConfig], Iterator[Fault]]


def untouched(
    section: str, got: object, defaults: object, where: str, keys: Sequence[str] = ()
) -> Iterator[Fault]:
    """Keys that this configuration does not read must have their defaults."""
    assert is_dataclass(defaults)
    for name in keys or [item.name for item in fields(defaults)]:
        value, default = getattr(got, name), getattr(defaults, name)
        if value != default:
            yield f"{section}.{name}", f"got {value!r}, expected {default!r}: only read for {where}"
