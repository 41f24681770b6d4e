"""Read YAML strictly: 1.2 core scalars, no key twice, faults by line and column."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import yaml

from agent_rl.config.suggestions import command_line
from agent_rl.errors import ConfigError


class YamlError(Exception):
    """Text that is not YAML; ``line`` and ``column`` count from 1."""

    def __init__(self, what: str, line: int, column: int) -> None:
        self.line, self.column = line, column
        super().__init__(what)


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the sections and values of a YAML file. Raises ``ConfigError``."""
    if path.is_dir():
        raise ConfigError([_folder_instead(path)])
    if not path.is_file():
        raise ConfigError([f"{path}: no such file (expected a YAML config)"])
    try:
        tree = parse_yaml(_decode(path.read_bytes()))
    except YamlError as fault:
        where = f"{path}:{fault.line}:{fault.column}"
        raise ConfigError([f"{where}: not valid YAML: {fault}"]) from fault
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError([f"{path}: got {type(tree).__name__}, expected a mapping of sections"])
    return cast(dict[str, Any], tree)


def parse_yaml(text: str) -> Any:
    """Return the plain value that ``text`` is. Raises ``YamlError``."""
    try:
        return yaml.load(text, Loader=_CoreLoader)  # a SafeLoader subclass
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = ", ".join(part for part in (error.problem, error.context) if part)
        at = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise YamlError(_in_our_words(what), *at) from error
    except yaml.reader.ReaderError as error:
        what = f"character {error.character:#x} is not allowed"
        raise YamlError(what, *_place(text[: error.position])) from error


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
    seen: list[Any] = []
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if key in seen:
            what = f"key {key!r} appears twice"
            raise yaml.constructor.ConstructorError(None, None, what, key_node.start_mark)
        seen.append(key)
    return loader.construct_mapping(node, deep=True)


def _construct_float(loader: _CoreLoader, node: yaml.ScalarNode) -> float:
    value = float(loader.construct_scalar(node).replace("_", ""))
    if abs(value) == float("inf"):
        what = f"{node.value} is too large for a float"
        raise yaml.constructor.ConstructorError(None, None, what, node.start_mark)
    return value


_CoreLoader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)
_CoreLoader.add_constructor("tag:yaml.org,2002:float", _construct_float)
_CoreLoader.add_constructor("tag:yaml.org,2002:binary", yaml.SafeLoader.construct_undefined)


def _in_our_words(what: str) -> str:
    """Say the faults that people make most as they see them, else leave ``what``."""
    if "'\\t'" in what:
        return "a tab, expected spaces"
    if what.startswith("mapping values are not allowed here"):
        return f"{what} (a ': ' inside a value needs quotes; else look at the indentation)"
    if what.startswith("expected <block end>"):
        return "the indentation fits none of the lines above"
    return what


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        before = raw[: error.start].decode("utf-8")
        raise YamlError(f"byte {raw[error.start]:#x} is not UTF-8", *_place(before)) from error


def _place(before: str) -> tuple[int, int]:
    """Return line and column, from 1, of what follows the text ``before``."""
    return before.count("\n") + 1, len(before) - before.rfind("\n")


def _folder_instead(path: Path) -> str:
    if not (path / "config.yaml").is_file():
        return f"{path}: got a folder, expected a YAML config"
    return (
        f"{path}: got the folder of a run, expected a YAML config; to go on with the run: "
        f"{command_line('agent-rl', 'train', '--resume', path)}; to start another like it: "
        f"{command_line('agent-rl', 'train', path / 'config.yaml')}"
    )
