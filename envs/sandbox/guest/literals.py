"""Typed literal values as plain text: all that code under test may hand to the judge.

No pickle and no ``repr``: only exact built-in types are encoded, each with its tag, so a subclass
with a forged ``__repr__`` or ``__eq__`` stays opaque. The judge compares decoded values by type
and value.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, cast

_MAX_DEPTH = 32
_MAX_ITEMS = 100_000


class LiteralFormatError(Exception):
    """An encoded value that is damaged or not a literal."""


@dataclass(frozen=True)
class Opaque:
    """A value that is not a literal; equal to nothing. ``type_name`` is what its code claims."""

    type_name: str


def encode(value: Any, depth: int = 0) -> list[Any]:
    """Return ``[tag, payload]`` of nested plain lists.

    What is no literal becomes an opaque mark.
    """
    kind = cast("type[object]", type(value))
    if depth > _MAX_DEPTH:
        return ["o", "deep"]
    if value is None:
        return ["n", None]
    if kind is bool:
        return ["b", value]
    if kind is int:
        return ["i", format(value, "x")]
    if kind is float or kind is complex:
        return ["f" if kind is float else "c", repr(value)]
    if kind is str:
        return ["s", value.encode("utf-8", "surrogatepass").hex()]
    if kind is bytes:
        return ["y", value.hex()]
    if kind in _CONTAINERS and len(value) <= _MAX_ITEMS:
        items: Iterable[Any] = value.items() if kind is dict else value
        return [_CONTAINERS[kind], [encode(item, depth + 1) for item in items]]
    return ["o", kind.__name__[:64]]


_CONTAINERS: dict[type, str] = {list: "l", tuple: "t", set: "S", frozenset: "F", dict: "d"}


def decode(encoded: object) -> object:
    """Return the value, with :class:`Opaque` where there was no literal.

    Raises LiteralFormatError.
    """
    try:
        return _decode(encoded)
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        raise LiteralFormatError(f"encoded value is damaged: {error}") from error


def _decode(encoded: Any) -> object:
    tag, payload = encoded
    if tag == "n":
        return None
    if tag == "b" and type(payload) is bool:
        return payload
    if tag == "i":
        return int(payload, 16)
    if tag == "f":
        return float(payload)
    if tag == "c":
        return complex(payload)
    if tag == "s":
        return bytes.fromhex(payload).decode("utf-8", "surrogatepass")
    if tag == "y":
        return bytes.fromhex(payload)
    if tag == "o":
        return Opaque(str(payload)[:64])
    items: list[Any] = [_decode(item) for item in payload]
    if tag == "d":
        return dict(items)
    return _BUILDERS[tag](items)


_BUILDERS: dict[str, Callable[[list[Any]], object]] = {
    "l": list,
    "t": tuple,
    "S": set,
    "F": frozenset,
}


def same(left: Any, right: Any) -> bool:
    """Compare type and value, also inside containers: ``True`` is not ``1``, 3.0 is not 3."""
    kind = cast("type[object]", type(left))
    if kind is not type(right) or kind is Opaque:
        return False
    if kind is list or kind is tuple:
        return len(left) == len(right) and all(map(same, left, right))
    if kind is dict:
        return _same_keys(left, right) and all(same(left[key], right[key]) for key in left)
    if kind is set or kind is frozenset:
        return _same_keys(left, right)
    return bool(left == right)


def _same_keys(left: Collection[Any], right: Collection[Any]) -> bool:
    own = {key: key for key in right}
    return len(left) == len(right) and all(key in own and same(key, own[key]) for key in left)
