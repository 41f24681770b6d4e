"""One-token bugs of a line of code, the repair tasks' own choice of the shared syntax kinds."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from envs.tasks import syntax_kinds as kinds
from envs.tasks.syntax_source import Edit, Scope, Source

# What a slip makes of an operator; the order is part of the tasks that a seed gives.
_COMPARISONS: kinds.Others = {
    "<": (">", "<=", ">="),
    ">": ("<", ">=", "<="),
    "<=": ("<", ">", ">="),
    ">=": (">", "<", "<="),
    "==": ("!=", ">"),
    "!=": ("==",),
}
_OPERATORS: kinds.Others = {"+": ("-", "*"), "-": ("+", "*"), "*": ("+", "-"), "%": ("*", "+")}
_ASSIGNMENTS: kinds.Others = {"+": ("-",), "-": ("+",)}
_KINDS: Mapping[str, kinds.Kind] = {
    "comparison": kinds.comparisons(_COMPARISONS),
    "operator": kinds.operators(_OPERATORS),
    "assignment": kinds.assignments(_ASSIGNMENTS),
    "constant": kinds.integers(lambda n: (n + 1, n + 2, n - 1) if n else (1, 2)),
}


@dataclass(frozen=True)
class Mutation:
    """A changed line and the kind of bug it is."""

    line: str
    kind: str  # "operator", "comparison", "assignment", "constant" or "variable"


def line_mutations(line: str, names: Collection[str]) -> list[Mutation]:
    """Return every one-token change of ``line``, from left to right.

    ``names`` are the variables that may be confused. There is none for a line that is no statement
    by itself, such as ``else:``."""
    return list(_mutations(line, tuple(names)))


@lru_cache(maxsize=4096)  # warm starts ask for the same lines again and again
def _mutations(line: str, names: tuple[str, ...]) -> tuple[Mutation, ...]:
    code = line.strip()
    indent = line[: len(line) - len(line.lstrip())]
    source = Source(code.encode())
    try:
        tree = ast.parse(f"{code} pass" if code.endswith(":") else code)
    except SyntaxError:
        return ()
    scope = Scope(source, "", tree)
    found = [(edit, kind) for node in ast.walk(tree) for edit, kind in _edits(node, scope)]
    found += [(edit, "variable") for edit in _confused(tree, source, names)]
    found.sort(key=lambda pair: pair[0].start)  # stable: one place's changes keep their order
    return tuple(Mutation(indent + source.apply(edit).decode(), kind) for edit, kind in found)


def _edits(node: ast.AST, scope: Scope) -> Iterator[tuple[Edit, str]]:
    for name, kind in _KINDS.items():
        for edit in kind(node, scope):
            yield edit, name


def _confused(tree: ast.AST, source: Source, names: tuple[str, ...]) -> Iterator[Edit]:
    """Put another variable in place of one.

    A loop header could loop for ever, and a method call on another name is no likely slip."""
    owners = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.For):
            return
        if isinstance(node, ast.Name) and node.id in names and id(node) not in owners:
            for other in names:
                if other != node.id:
                    yield source.replace(node, other)


def variable_names(body: Collection[str], args: Collection[str]) -> list[str]:
    """Return the arguments, then the names that the body assigns, in order of appearance."""
    names = list(args)
    for line in body:
        match = re.match(r"\s*(\w+) =", line) or re.match(r"\s*for (\w+) in", line)
        if match and match.group(1) not in names:
            names.append(match.group(1))
    return names
