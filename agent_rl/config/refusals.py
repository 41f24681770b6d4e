"""Say in our words what pydantic refuses: the key, what it got and what was expected."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from agent_rl.config.keys import keys_of

_OF_RANGES = {"greater_than", "greater_than_equal", "less_than_equal", "string_pattern_mismatch"}


@dataclass(frozen=True)
class Refusal:
    """A key that cannot be taken, and why. ``out_of_range``: ``value`` has the right type."""

    key: str
    text: str
    value: Any
    out_of_range: bool


def refusals(schema: type[object], error: ValidationError) -> list[Refusal]:
    """Return what ``error`` says about the keys of ``schema``, each key once."""
    keys = keys_of(schema)
    found: dict[str, Refusal] = {}
    for one in error.errors(include_url=False):
        # Items of a list are numbered behind its key.
        name = ".".join(part for part in one["loc"] if isinstance(part, str))
        value = one["input"]
        if one["type"] == "unexpected_keyword_argument":
            text = _unknown(name, keys)
        elif name not in keys:
            text = f"got {_show(value)}, expected a section of keys"
        else:
            inside = " in the list" if name != ".".join(map(str, one["loc"])) else ""
            text = f"got {_show(value)}{inside}, expected {keys[name].expected}"
        found.setdefault(name, Refusal(name, text, value, one["type"] in _OF_RANGES))
    return list(found.values())


def _unknown(name: str, names: Iterable[str]) -> str:
    before, dot, last = name.rpartition(".")
    prefix = before + dot
    inside = (known.removeprefix(prefix) for known in names if known.startswith(prefix))
    valid = list(dict.fromkeys(known.partition(".")[0] for known in inside))
    near = difflib.get_close_matches(last, valid, n=1, cutoff=0.5)
    hint = f"did you mean {prefix}{near[0]}?" if near else f"expected one of {', '.join(valid)}"
    return f"unknown key; {hint}"


def _show(value: object) -> str:
    return f"{value!r} ({type(value).__name__})"
