"""Declare a configuration: a section is a frozen dataclass that pydantic checks, key by key.

A key is declared with its type, its range, its default and its meaning, and nowhere else; the
pages of ``agent-rl config``, the messages about wrong values and the rules about keys that nobody
reads all take them from here.

Example:
    >>> @section
    ... class Oven:
    ...     heat: Fraction = key(0.5, "of full power")
    >>> Oven(heat=2)
    Traceback (most recent call last):
    agent_rl.errors.ConfigError: Oven: heat: got 2 (int), expected float, from 0 to 1
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, cast, dataclass_transform

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from agent_rl.config.refusals import refusals
from agent_rl.errors import ConfigError

_T = TypeVar("_T")
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


@dataclass_transform(frozen_default=True, kw_only_default=True)
def section(kind: type[_T]) -> type[_T]:
    """Make ``kind`` a frozen dataclass whose values are checked, also when code constructs it.

    Types are strict: no text for a number, no bool for an int, an int for a float, no infinity.
    A wrong value raises ``ConfigError``.
    """
    made = cast(type[_T], dataclass(frozen=True, kw_only=True, config=_STRICT)(kind))
    construct: Callable[..., None] = made.__init__

    @functools.wraps(construct)
    def construct_or_refuse(self: object, **values: Any) -> None:
        try:
            construct(self, **values)
        except ValidationError as error:
            found = refusals(kind, error)
            raise ConfigError(
                [f"{kind.__name__}: {one.key}: {one.text}" for one in found]
            ) from None

    setattr(made, "__init__", construct_or_refuse)  # noqa: B010 (the type knows no such method)
    return made


def key(
    default: _T, meaning: str, *, only_for: str = "", expected: str = "", **limits: float | str
) -> _T:
    """Declare one key of a section.

    ``only_for`` says when the key is read; empty is always. ``limits`` are those of pydantic
    (``ge``, ``gt``, ``le``, ``pattern``); ``expected`` says a pattern in words.
    """
    texts = {"only_for": only_for, "expected": expected}
    extra = {name: text for name, text in texts.items() if text}
    metadata = {"description": meaning, "json_schema_extra": extra, **limits}
    return dataclasses.field(default=default, metadata=metadata)


def only_for(item: dataclasses.Field[Any]) -> str:
    """Return when the key ``item`` is read; empty is always."""
    return item.metadata["json_schema_extra"].get("only_for", "")
