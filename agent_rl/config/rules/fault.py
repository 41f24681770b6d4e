"""A rule, what it yields, and the rule about keys that nobody reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import fields, is_dataclass

from agent_rl.config.declaring import only_for
from agent_rl.config.schema import RunConfig

Fault = tuple[str, str]  # key, what is wrong
Rule = Callable[[RunConfig], Iterator[Fault]]


def untouched(
    section: str, got: object, where: str, all_but: Collection[str] | None = None
) -> Iterator[Fault]:
    """Yield the keys that are only read for ``where`` and do not have their defaults.

    ``got`` is the section of that name. Its keys say themselves for what they are read; with
    ``all_but`` the whole section is meant but for those.
    """
    assert is_dataclass(got)
    for item in fields(got):
        meant = item.name not in all_but if all_but is not None else only_for(item) == where
        value = getattr(got, item.name)
        if meant and value != item.default:
            text = f"got {value!r}, expected {item.default!r}: only read for {where}"
            yield f"{section}.{item.name}", text
