"""Packages that a repository imports and this environment has: its images need the same."""

from __future__ import annotations

import ast
import sys
from importlib.metadata import packages_distributions, version

from envs.tasks.from_repository.repository import Repository


def requirements(repository: Repository) -> tuple[str, ...]:
    """Return ``name==version`` of every installed package that a file imports, pytest included.

    Tests were validated with these; optional ones count, since tests are skipped without them.
    """
    known = packages_distributions()
    imported = {"pytest"}
    for path, content in repository.files.items():
        if path.endswith(".py"):
            imported |= _imports(content)
    own = {path.split("/")[0].removesuffix(".py") for path in _inside(repository)}
    names = {
        distribution
        for module in imported - own - sys.stdlib_module_names
        for distribution in known.get(module, ())
    }
    return tuple(sorted(f"{name}=={version(name)}" for name in names))


def _inside(repository: Repository) -> list[str]:
    """Return paths as imports see them."""
    found = list(repository.files)
    for folder in repository.import_folders:
        found += [p.removeprefix(f"{folder}/") for p in found if p.startswith(f"{folder}/")]
    return found


def _imports(content: bytes) -> set[str]:
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError):
        return set()
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.partition(".")[0])
    return found
