"""An issue as a user would report it: what was run, what came out. The fix is not named."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence

_MAX_SHOWN = 2
_MAX_LINES = 40
_HEADER = re.compile(rb"^_{3,} (.+) _{3,}$|^={3,}.*$", re.MULTILINE)


def write_issue(title: str, failing: Sequence[str], files: Mapping[str, bytes], log: bytes) -> str:
    """Write Markdown from the failing tests' code and messages.

    ``title`` names the package, ``files`` holds the test files."""
    sections = _sections(log)
    parts: list[str] = []
    shown = _one_each(failing)[:_MAX_SHOWN]
    for test in shown:
        code = _test_source(test, files)
        output = sections.get(_section_name(test), "")
        parts.append(f"This code\n\n```python\n{code}\n```\n\ngives\n\n```\n{output}\n```")
    headline = _headline(sections.get(_section_name(failing[0]), ""))
    more = len(failing) - len(parts)
    if more > 0:
        parts.append(f"{more} similar checks go wrong as well.")
    return f"{title}: {headline}\n\n" + "\n\n".join(parts)


def _one_each(tests: Sequence[str]) -> list[str]:
    """Return the first of each function's parameter sets."""
    return list({_function(test): test for test in reversed(tests)}.values())[::-1]


def _function(test: str) -> str:
    return re.sub(r"\[.*", "", test, flags=re.DOTALL)


def _headline(output: str) -> str:
    errors = [line[1:].strip() for line in output.splitlines() if line.startswith("E ")]
    return (errors[0] if errors else "wrong result")[:100]


def _sections(log: bytes) -> dict[str, str]:
    """Return pytest's failure reports by their headline."""
    found: dict[str, str] = {}
    matches = list(_HEADER.finditer(log))
    for number, match in enumerate(matches, start=1):
        end = matches[number].start() if number < len(matches) else len(log)
        if match.group(1) is None:
            continue
        lines = log[match.end() : end].decode("utf-8", "replace").strip("\n").splitlines()
        if len(lines) > _MAX_LINES:
            lines = [*lines[:5], "[…]", *lines[5 - _MAX_LINES :]]
        found.setdefault(match.group(1).decode("utf-8", "replace"), "\n".join(lines))
    return found


def _section_name(test: str) -> str:
    """Return the headline: ``tests/a.py::TestC::test_x[1]`` has ``TestC.test_x[1]``."""
    return ".".join(test.split("::")[1:])


def _test_source(test: str, files: Mapping[str, bytes]) -> str:
    """Return the test function's code without its place in a class."""
    path, *names = _function(test).split("::")
    text = files[path].decode("utf-8", "replace")
    body: list[ast.stmt] = ast.parse(text).body
    node: ast.stmt | None = None
    for name in names:
        node = next((n for n in body if getattr(n, "name", None) == name), None)
        if node is None:
            return f"# {test}"
        body = node.body if isinstance(node, ast.ClassDef) else []
    segment = ast.get_source_segment(text, node, padded=True) if node is not None else None
    lines = (segment or f"# {test}").splitlines()
    indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    shown = [line[indent:] for line in lines]
    return "\n".join([*shown[:_MAX_LINES], "…"] if len(shown) > _MAX_LINES else shown)
