"""What every configuration key means, read from where the keys are declared.

A key's meaning is the comment on its line or the ones directly above it in
``agent_rl/config/schema.py``; a comment that begins with "The rest is" speaks of every key
after it. The page ``docs/configuration.md`` is ``reference_page()``.
"""

from __future__ import annotations

import ast
import inspect
import io
import tokenize
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass

from agent_rl.config import schema
from agent_rl.config.reading import config_surface

_REST = "The rest is "
_HEAD = """\
# Configuration

A run is described by a YAML file of these keys, for example
[configs/repair_tiny.yaml](../configs/repair_tiny.yaml). Keys that a file leaves out have their
defaults. Any key can be set on the command line: `agent-rl train FILE train.steps=50 seed=1`.
Unknown keys, wrong types and keys that contradict each other are refused before anything starts,
with the nearest valid name.

`agent-rl config` prints this list, `agent-rl config routing` one section. A run's folder holds its
whole configuration as `config.yaml`. This page is made from
[agent_rl/config/schema.py](../agent_rl/config/schema.py) by
`agent-rl config --markdown > docs/configuration.md`.
"""


@dataclass(frozen=True)
class Key:
    """One key: dotted ``name``, its type or choices, its default as YAML, and what it means.

    ``only_for`` says when it is read at all; empty is always.
    """

    name: str
    kind: str
    default: str
    meaning: str
    only_for: str = ""


@dataclass(frozen=True)
class Section:
    """Keys of one section; the first one, without a name, has those of no section."""

    name: str
    about: str
    keys: tuple[Key, ...]


def sections() -> list[Section]:
    """Every key of a configuration, in the order of its declaration."""
    declared = _declarations()
    types = _types_and_defaults()
    hints = typing.get_type_hints(schema.RunConfig)
    nested = {
        f.name: hints[f.name] for f in fields(schema.RunConfig) if is_dataclass(hints[f.name])
    }
    top = [name for name in declared["RunConfig"].keys if name not in nested]
    found = [_section("", declared["RunConfig"], top, types)]
    for name, kind in nested.items():
        known = declared[kind.__name__]
        found.append(_section(name, known, list(known.keys), types))
    return found


def reference_page() -> str:
    """All keys as Markdown."""
    parts = [_HEAD]
    for section in sections():
        if section.name:
            parts.append(f"## {section.name}\n\n{section.about}\n")
        parts.append(_table(section.keys))
    return "\n".join(parts)


@dataclass(frozen=True)
class _Declared:
    about: str
    keys: Mapping[str, tuple[str, str]]  # field -> meaning, what the rest is for


def _section(
    name: str, declared: _Declared, keys: Sequence[str], types: Mapping[str, tuple[str, str]]
) -> Section:
    rows: list[Key] = []
    for key in keys:
        full = f"{name}.{key}" if name else key
        rows.append(Key(full, *types[full], *declared.keys[key]))
    return Section(name, declared.about, tuple(rows))


def _types_and_defaults() -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    for line in config_surface():
        name, _, rest = line.partition(": ")
        kind, _, default = rest.rpartition(" = ")
        found[name] = kind, _yaml(default)
    return found


def _yaml(default: str) -> str:
    """A Python literal as one writes it in YAML."""
    value: object = ast.literal_eval(default)
    if isinstance(value, bool):
        return str(value).lower()
    if value == () or value is None:
        return "null" if value is None else "[]"
    return (value or '""') if isinstance(value, str) else str(value)


def _declarations() -> dict[str, _Declared]:
    """Of every schema class its docstring and the comments of its fields."""
    source = inspect.getsource(schema)
    comments = _comments(source)
    found: dict[str, _Declared] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = _Declared(_about(node), _fields(node, comments))
    return found


def _about(node: ast.ClassDef) -> str:
    text = (ast.get_docstring(node) or "").partition("\n\nExample:")[0]
    return _code(text)


def _code(text: str) -> str:
    return text.replace("``", "`")


def _fields(
    node: ast.ClassDef, comments: Mapping[int, tuple[bool, str]]
) -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    only_for = ""
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        above: list[str] = []
        line = item.lineno - 1
        while line in comments and comments[line][0]:
            above.insert(0, comments[line][1])
            line -= 1
        if above and above[0].startswith(_REST):
            only_for = above.pop(0).removeprefix(_REST).rstrip(".")
        last = item.end_lineno or item.lineno
        beside = [comments[n][1] for n in (item.lineno, last) if n in comments][:1]
        found[item.target.id] = _code(" ".join([*above, *beside])), only_for
    return found


def _comments(source: str) -> dict[int, tuple[bool, str]]:
    """By line: whether the comment has it for itself, and its text."""
    found: dict[int, tuple[bool, str]] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            alone = not token.line[: token.start[1]].strip()
            found[token.start[0]] = alone, token.string.removeprefix("#").strip()
    return found


def _table(keys: Sequence[Key]) -> str:
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key in keys:
        limit = f" ({key.only_for})" if key.only_for else ""
        cells = (f"`{key.name}`", key.kind, f"`{key.default}`", key.meaning + limit)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
