"""Reading configurations: YAML, dotlist overrides, strict types. The only place with OmegaConf.

``load_config`` refuses unknown keys with the nearest valid name, checks types strictly and every
cross-field rule, and raises one ``ConfigError`` that lists *all* faults, one line each with the
file (or ``override``) and the key.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from agent_rl.config.rules import check_rules, check_rules_anywhere
from agent_rl.config.schema import RunConfig
from agent_rl.config.suggestions import command_line
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
    """``load_config`` for any schema of nested dataclasses with defaults.

    ``rules`` yields (key, what is wrong) for faults between keys. Raises ``ConfigError``.
    """
    path = Path(path)
    problems: list[str] = []
    tree = _read_file(path)
    origin = {key: str(path) for key in _leaf_keys(tree)}
    for override in overrides:
        try:
            key, branch = _parse_override(override)
        except ConfigError as error:
            problems += error.problems
            continue
        parts = key.split(".")
        origin[key] = _OVERRIDE
        origin |= {
            ".".join(parts[:n]): _OVERRIDE
            for n in range(1, len(parts))
            if ".".join(parts[:n]) not in origin
        }
        try:
            tree = _plain(OmegaConf.merge(OmegaConf.create(tree), OmegaConf.create(branch)))
        except OmegaConfBaseException as error:
            problems.append(f"{_OVERRIDE}: {key}: {_first_line(error)}")
    tree = _resolve(tree, str(path))
    reader = _Reader(origin, str(path))
    config = reader.read(schema, tree, "")
    problems += reader.problems
    if problems or config is None:
        raise ConfigError(problems)
    faults = [f"{origin.get(key, str(path))}: {key}: {text}" for key, text in rules(config)]
    if faults:
        raise ConfigError(faults)
    return config


def config_from_dict(tree: Mapping[str, Any], source: str = "config") -> RunConfig:
    """A checked ``RunConfig`` from a nested mapping, as a saved run holds it."""
    reader = _Reader({}, source)
    config = reader.read(RunConfig, dict(tree), "")
    if reader.problems or config is None:
        raise ConfigError(reader.problems)
    return config


def load_resolved(path: Path) -> RunConfig:
    """Read a config that a run saved: complete, so no rules are applied again."""
    return config_from_dict(_read_file(path), str(path))


def dump_config(config: RunConfig) -> str:
    """The whole resolved config as YAML; ``load_resolved`` reads it back to an equal object."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


def top_level_keys(path: Path) -> list[str]:
    """Names of the sections and values at the top of a YAML file. Raises ``ConfigError``."""
    return list(_read_file(path))


def config_surface() -> list[str]:
    """Every key with its type and default, one line each: what a config may contain."""
    return list(_surface(RunConfig, ""))


class _CoreLoader(yaml.SafeLoader):
    """YAML with the 1.2 core scalars only: no sexagesimal, octal, yes/no or dates."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (the base class declares it so)


_DIGITS, _EXPONENT = r"[0-9][0-9_]*", r"[eE][-+]?[0-9]+"
_FLOAT = (
    rf"[-+]?(?:{_DIGITS}\.[0-9_]*(?:{_EXPONENT})?|\.{_DIGITS}(?:{_EXPONENT})?|{_DIGITS}{_EXPONENT})"
)
for _tag, _pattern, _first in (
    ("bool", r"true|false", "tf"),
    ("null", r"null|~|", ["n", "~", ""]),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
):
    _CoreLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first)
    )


def _construct_mapping(loader: _CoreLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key) for key, _ in node.value]
    for key in (key for key in keys if keys.count(key) > 1):
        raise yaml.constructor.ConstructorError(
            None, None, f"key {key!r} appears twice", node.start_mark
        )
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


def _construct_float(loader: _CoreLoader, node: yaml.ScalarNode) -> float:
    value = float(loader.construct_scalar(node).replace("_", ""))
    if not math.isfinite(value):
        raise yaml.constructor.ConstructorError(
            None, None, f"{node.value} is too large for a float", node.start_mark
        )
    return value


_CoreLoader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)
_CoreLoader.add_constructor("tag:yaml.org,2002:float", _construct_float)


def _load_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_CoreLoader)  # a SafeLoader subclass


def _read_file(path: Path) -> dict[str, Any]:
    if path.is_dir():
        raise ConfigError([_folder_instead(path)])
    if not path.is_file():
        raise ConfigError([f"{path}: no such file (expected a YAML config)"])
    try:
        tree = _load_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: not valid YAML: {_first_line(error)}"]) from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError([f"{path}: got {type(tree).__name__}, expected a mapping of sections"])
    return typing.cast(dict[str, Any], tree)


def _folder_instead(path: Path) -> str:
    if not (path / "config.yaml").is_file():
        return f"{path}: got a folder, expected a YAML config"
    return (
        f"{path}: got the folder of a run, expected a YAML config; to go on with the run: "
        f"{command_line('agent-rl', 'train', '--resume', path)}; to start another like it: "
        f"{command_line('agent-rl', 'train', path / 'config.yaml')}"
    )


def _parse_override(text: str) -> tuple[str, dict[str, Any]]:
    key, equals, value = text.partition("=")
    parts = key.split(".")
    if not equals or not all(re.fullmatch(r"\w+", part) for part in parts):
        raise ConfigError([f"{_OVERRIDE}: got {text!r}, expected section.key=value"])
    try:
        branch: Any = _load_yaml(value)
    except yaml.YAMLError as error:
        raise ConfigError([f"{_OVERRIDE}: {key}: not valid YAML: {_first_line(error)}"]) from error
    for part in reversed(parts):
        branch = {part: branch}
    return key, branch


def _resolve(tree: dict[str, Any], source: str) -> dict[str, Any]:
    """Fill in ``${section.key}`` references."""
    try:
        node = OmegaConf.create(tree)
        OmegaConf.resolve(node)
        return _plain(node)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or ""
        raise ConfigError([f"{source}: {key}: {_first_line(error)}"]) from error


def _plain(node: Any) -> dict[str, Any]:
    return typing.cast(dict[str, Any], OmegaConf.to_container(node))


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(lines[:2]) if isinstance(error, yaml.YAMLError) else lines[0]


def _leaf_keys(tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for key, value in tree.items():
        full = f"{prefix}{key}"
        keys.append(full)
        if isinstance(value, dict):
            keys += _leaf_keys(typing.cast(dict[str, Any], value), f"{full}.")
    return keys


class _Reader:
    """Turns plain containers into dataclasses and collects every fault on the way."""

    def __init__(self, origin: Mapping[str, str], source: str) -> None:
        self._origin, self._source = origin, source
        self.problems: list[str] = []

    def read(self, kind: type[_T], tree: Any, prefix: str) -> _T | None:
        if not isinstance(tree, dict):
            self._fault(prefix.rstrip("."), f"got {_show(tree)}, expected a section of keys")
            return None
        before = len(self.problems)
        hints = typing.get_type_hints(kind)
        values: dict[str, Any] = {}
        for key, value in typing.cast(dict[str, Any], tree).items():
            full = f"{prefix}{key}"
            if key not in hints:
                self._fault(full, _unknown(str(key), list(hints), prefix))
            elif dataclasses.is_dataclass(hints[key]):
                values[key] = self.read(typing.cast(type[Any], hints[key]), value, f"{full}.")
            else:
                values[key] = self._scalar(hints[key], value, full)
        return kind(**values) if len(self.problems) == before else None

    def _scalar(self, hint: Any, value: Any, key: str) -> Any:
        if value == "???":
            self._fault(key, f"no value given, expected {_hint_name(hint)}")
            return None
        ok, converted = _convert(hint, value)
        if not ok:
            self._fault(key, f"got {_show(value)}, expected {_hint_name(hint)}")
        return converted

    def _fault(self, key: str, text: str) -> None:
        self.problems.append(f"{self._origin.get(key, self._source)}: {key}: {text}")


def _convert(hint: Any, value: Any) -> tuple[bool, Any]:
    """Whether ``value`` is of type ``hint``, and the value to use. An int may stand for a float."""
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        options = typing.get_args(hint)
        return any(value is o or (value == o and type(value) is type(o)) for o in options), value
    if origin in (types.UnionType, typing.Union):
        for option in typing.get_args(hint):
            ok, converted = _convert(option, value)
            if ok:
                return True, converted
        return False, value
    if origin is tuple:
        item = typing.get_args(hint)[0]
        if not isinstance(value, list):
            return False, value
        pairs = [_convert(item, v) for v in typing.cast(list[Any], value)]
        return all(ok for ok, _ in pairs), tuple(v for _, v in pairs)
    if hint is float and type(value) is int:
        return True, float(value)
    if hint is type(None):
        return value is None, value
    return type(value) is hint, value


def _unknown(key: str, valid: list[str], prefix: str) -> str:
    near = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    hint = f"did you mean {prefix}{near[0]}?" if near else f"expected one of {', '.join(valid)}"
    return f"unknown key; {hint}"


def _hint_name(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(str(option) for option in typing.get_args(hint))
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(_hint_name(option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"a list of {_hint_name(typing.get_args(hint)[0])}"
    return {type(None): "null"}.get(hint, getattr(hint, "__name__", str(hint)))


def _show(value: Any) -> str:
    return f"{value!r} ({type(value).__name__})"


def _surface(kind: type[Any], prefix: str) -> typing.Iterator[str]:
    hints = typing.get_type_hints(kind)
    instance = kind()
    for item in dataclasses.fields(kind):
        hint, default = hints[item.name], getattr(instance, item.name)
        if dataclasses.is_dataclass(hint):
            yield from _surface(typing.cast(type[Any], hint), f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}: {_hint_name(hint)} = {default!r}"
