"""Read configurations: YAML, overrides, strict types. The only place with OmegaConf.

``load_config`` refuses unknown keys with the nearest valid name, wrong types, values out of range
and every broken rule between keys, and raises one ``ConfigError`` that lists *all* faults, one line
each with the file (or ``override``) and the key.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from agent_rl.config.keys import keys_of
from agent_rl.config.refusals import Refusal, refusals
from agent_rl.config.rules import check_rules, check_rules_anywhere
from agent_rl.config.schema import RunConfig
from agent_rl.config.yaml_files import YamlError, parse_yaml, read_mapping
from agent_rl.errors import ConfigError

_T = TypeVar("_T")
_OVERRIDE = "override"


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, on_this_machine: bool = True
) -> RunConfig:
    """Read ``path``, apply ``overrides`` (``section.key=value``) and check everything.

    ``on_this_machine`` False leaves out what only this machine lacks, such as the policy's files.
    Raises ``ConfigError`` with every fault found.
    """
    rules = check_rules if on_this_machine else check_rules_anywhere
    return read_config(RunConfig, path, overrides, rules=rules)


def read_config(
    schema: type[_T],
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    rules: Callable[[_T], Iterable[tuple[str, str]]],
) -> _T:
    """Do what ``load_config`` does for any section of ``declaring``.

    ``rules`` yields (key, what is wrong) for faults between keys. Raises ``ConfigError``.
    """
    path = Path(path)
    tree = read_mapping(path)
    in_file = frozenset(key for key, _ in _items(tree))
    tree, overridden, problems = _merge(tree, overrides)
    sources = _Sources(str(path), in_file, overridden)
    tree, broken = _interpolate(tree)
    config, refused = _build(schema, tree)
    faults = broken + [(one.key, one.text) for one in refused]
    if config is not None and not problems and not broken:
        said = {one.key for one in refused}
        faults += [fault for fault in rules(config) if fault[0] not in said]
    problems += [f"{sources.of(key)}: {key}: {text}" for key, text in faults]
    if problems or config is None:
        raise ConfigError(problems)
    return config


def config_from_dict(tree: Mapping[str, Any], source: str = "config") -> RunConfig:
    """Return a checked ``RunConfig`` from a nested mapping, as a saved run holds it."""
    config, refused = _build(RunConfig, dict(tree))
    if refused or config is None:
        raise ConfigError([f"{source}: {one.key}: {one.text}" for one in refused])
    return config


def load_resolved(path: Path) -> RunConfig:
    """Read a config that a run saved: complete, so no rules are applied again."""
    return config_from_dict(read_mapping(path), str(path))


def dump_config(config: RunConfig) -> str:
    """Return the whole config as YAML; ``load_resolved`` reads it back to an equal object."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


def top_level_keys(path: Path) -> list[str]:
    """Return the names at the top of a YAML file. Raises ``ConfigError``."""
    return list(read_mapping(path))


@dataclasses.dataclass(frozen=True)
class _Sources:
    """The place where each key was set."""

    path: str
    in_file: frozenset[str]
    overridden: Sequence[str]

    def of(self, key: str) -> str:
        for name in self.overridden:
            above = name.startswith(f"{key}.") and key not in self.in_file
            if key == name or key.startswith(f"{name}.") or above:
                return _OVERRIDE
        return self.path


def _merge(
    tree: dict[str, Any], overrides: Sequence[str]
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return the tree with its overrides, the keys they set, and problems with them."""
    overridden: list[str] = []
    problems: list[str] = []
    for override in overrides:
        key, equals, value = override.partition("=")
        parts = key.split(".")
        if not equals or not all(re.fullmatch(r"\w+", part) for part in parts):
            problems.append(f"{_OVERRIDE}: got {override!r}, expected section.key=value")
            continue
        try:
            branch = parse_yaml(value)
            for part in reversed(parts):
                branch = {part: branch}
            merged = OmegaConf.merge(OmegaConf.create(tree), OmegaConf.create(branch))
        except YamlError as fault:
            problems.append(f"{_OVERRIDE}: {key}: got {value!r}, not valid YAML: {fault}")
        except OmegaConfBaseException as error:
            problems.append(f"{_OVERRIDE}: {key}: {_first_line(error)}")
        else:
            tree = _plain(merged)
            overridden.append(key)
    return tree, overridden, problems


def _interpolate(tree: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Fill in ``${section.key}`` references. Returns also (key, what is wrong) of broken ones."""
    faults: list[tuple[str, str]] = []
    while True:
        try:
            node = OmegaConf.create(tree)
            OmegaConf.resolve(node)
            return _plain(node), faults
        except OmegaConfBaseException as error:
            key = (getattr(error, "full_key", None) or "").partition("[")[0]
            faults.append((key, _first_line(error)))
            if (rest := _without(tree, {key})) == tree:
                return {}, faults
            tree = rest


def _build(schema: type[_T], tree: dict[str, Any]) -> tuple[_T | None, list[Refusal]]:
    """Make the object, and say which keys are refused.

    Where all that is wrong is out of its range there is an object all the same, so that the rules
    between keys can speak at the same time. JSON is the form in which pydantic takes lists for
    tuples and mappings for sections and stays strict about everything else.
    """
    adapter = TypeAdapter(schema)
    refused = _left_open(schema, tree)
    tree = _without(tree, {one.key for one in refused})
    try:
        config = adapter.validate_json(json.dumps(tree))
        return None if refused else config, refused
    except ValidationError as error:
        refused += refusals(schema, error)
    if not all(one.out_of_range for one in refused):
        return None, refused
    config = adapter.validate_json(json.dumps(_without(tree, {one.key for one in refused})))
    for one in refused:
        *sections, name = one.key.split(".")
        object.__setattr__(functools.reduce(getattr, sections, config), name, one.value)
    return config, refused


def _left_open(schema: type[object], tree: Mapping[str, Any]) -> list[Refusal]:
    """Refuse the keys whose value is ``???``, which OmegaConf has for "to be given"."""
    keys = keys_of(schema)
    return [
        Refusal(name, f"no value given, expected {keys[name].expected}", value, out_of_range=False)
        for name, value in _items(tree)
        if value == "???" and name in keys
    ]


def _without(tree: Mapping[str, Any], keys: set[str], prefix: str = "") -> dict[str, Any]:
    """Return a copy of ``tree`` that lacks the dotted ``keys``."""
    rest: dict[str, Any] = {}
    for key, value in tree.items():
        if f"{prefix}{key}" not in keys:
            inner = cast(dict[str, Any], value) if isinstance(value, dict) else None
            rest[key] = value if inner is None else _without(inner, keys, f"{prefix}{key}.")
    return rest


def _items(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every dotted key with its value, sections included."""
    for key, value in tree.items():
        yield f"{prefix}{key}", value
        if isinstance(value, dict):
            yield from _items(cast(dict[str, Any], value), f"{prefix}{key}.")


def _plain(node: Any) -> dict[str, Any]:
    return cast(dict[str, Any], OmegaConf.to_container(node))


def _first_line(error: Exception) -> str:
    return next(line.strip() for line in str(error).splitlines() if line.strip())
