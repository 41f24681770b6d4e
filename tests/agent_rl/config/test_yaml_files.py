"""YAML that cannot be read is told by line and column; scalars are those of YAML 1.2."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_rl.config.yaml_files import YamlError, parse_yaml, read_mapping
from agent_rl.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        ("train:\n  steps: 3\n   keep_last: 2", "3:13", "mapping values are not allowed here"),
        ("train:\n    steps: 3\n  keep_last: 2", "3:3", "indentation fits none of the lines above"),
        ("train:\n\tsteps: 3", "2:1", "a tab, expected spaces"),
        ("seed: 1\nname: a\nseed: 2", "3:1", "key 'seed' appears twice"),
        ("train:\n  steps: 1\n  steps: 2", "3:3", "key 'steps' appears twice"),
        ("optim: {lr: 1e999}", "1:13", "too large"),
        ("seed: 1\nname: a\x07b", "2:8", "character 0x7 is not allowed"),
    ],
)
def test_what_is_not_yaml_is_told_by_line_and_column(
    tmp_path: Path, text: str, place: str, what: str
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_mapping(file)
    [problem] = caught.value.problems
    assert problem.startswith(f"{file}:{place}: not valid YAML: ")
    assert what in problem


def test_bytes_that_are_no_text_are_told_by_line_and_column(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes("seed: 1\nname: ü".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"config\.yaml:2:7: not valid YAML: byte 0xfc is"):
        read_mapping(file)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("yes", "yes"),
        ("12:30:00", "12:30:00"),
        ("008", "008"),
        ("0x10", "0x10"),
        ("2001-01-01", "2001-01-01"),
        (".inf", ".inf"),
        ("1_000", 1000),
        ("1e3", 1000.0),
        ("~", None),
        ("true", True),
    ],
)
def test_scalars_are_text_unless_they_plainly_are_not(text: str, value: object) -> None:
    found = parse_yaml(text)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("text", ["!!binary aGk=", "!!python/object:a.B {}"])
def test_tags_make_no_objects(text: str) -> None:
    with pytest.raises(YamlError, match="could not determine a constructor for the tag"):
        parse_yaml(text)
