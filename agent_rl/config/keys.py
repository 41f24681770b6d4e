"""Describe the keys of a schema: name, type, range, default and meaning, in words.

All of it comes from pydantic's own description of the schema.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

_TYPES = {"integer": "int", "number": "float", "string": "str", "boolean": "bool", "null": "null"}


@dataclass(frozen=True)
class Key:
    """One key: dotted ``name``, its type or choices, its range, its default as YAML, its meaning.

    ``only_for`` says when it is read at all; empty is always.
    """

    name: str
    kind: str
    limits: str
    default: str
    meaning: str
    only_for: str = ""

    @property
    def expected(self) -> str:
        """Type and range together; the form of a text says both."""
        parts = [self.limits] if self.kind == "str" else [self.kind, self.limits]
        return ", ".join(part for part in parts if part) or self.kind

    @property
    def about(self) -> str:
        """Meaning, and when the key is read if that is not always."""
        return f"{self.meaning} (only read for {self.only_for})" if self.only_for else self.meaning


@dataclass(frozen=True)
class Section:
    """Keys of one section; the first one, without a name, has those of no section."""

    name: str
    about: str
    keys: tuple[Key, ...]


@functools.cache
def sections_of(schema: type[object]) -> tuple[Section, ...]:
    """Return every key of ``schema``, a section, in the order of its declaration."""
    described = TypeAdapter(schema).json_schema()
    return tuple(_sections("", described, described.get("$defs", {})))


@functools.cache
def keys_of(schema: type[object]) -> Mapping[str, Key]:
    """Return every key of ``schema`` by its dotted name."""
    return {key.name: key for section in sections_of(schema) for key in section.keys}


def _sections(
    name: str, described: Mapping[str, Any], definitions: Mapping[str, Any]
) -> Iterator[Section]:
    prefix = f"{name}." if name else ""
    items = described["properties"].items()
    about = _code(described.get("description", "").partition("\n\nExample:")[0])
    keys = [_key(prefix + item, field) for item, field in items if "$ref" not in field]
    yield Section(name, about, tuple(keys))
    for item, field in items:
        if "$ref" in field:
            inner = definitions[field["$ref"].rpartition("/")[2]]
            yield from _sections(prefix + item, inner, definitions)


def _key(name: str, field: Mapping[str, Any]) -> Key:
    choices = field.get("anyOf", [field])
    default = field["default"]
    return Key(
        name=name,
        kind=" or ".join(_kind(choice) for choice in choices),
        limits=field.get("expected") or _limits(choices[0]),
        default=(default or '""') if isinstance(default, str) else json.dumps(default),
        meaning=_code(field.get("description", "")),
        only_for=field.get("only_for", ""),
    )


def _kind(field: Mapping[str, Any]) -> str:
    if "enum" in field or "const" in field:
        return "one of " + ", ".join(field.get("enum") or [field["const"]])
    if field["type"] == "array":
        return f"a list of {_kind(field['items'])}"
    return _TYPES[field["type"]]


def _limits(field: Mapping[str, Any]) -> str:
    low, above, high = (field.get(n) for n in ("minimum", "exclusiveMinimum", "maximum"))
    if above is not None and field["type"] == "integer":
        low, above = above + 1, None
    if low is not None:
        return f"{low} or more" if high is None else f"from {low} to {high}"
    parts = [f"above {above}"] if above is not None else []
    return ", ".join(parts + ([f"at most {high}"] if high is not None else []))


def _code(text: str) -> str:
    return text.replace("``", "`")
