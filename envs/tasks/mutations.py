"""One-token bugs: every way to spoil a line of code that the repair tasks know."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

_PIECES = re.compile(r"\s+|\d+|\w+|[+\-*/%<>=!]=|//|[^\w\s]")

_OPERATORS: dict[str, tuple[str, ...]] = {
    "+": ("-", "*"),
    "-": ("+", "*"),
    "*": ("+", "-"),
    "%": ("*", "+"),
    "+=": ("-=",),
    "-=": ("+=",),
    "<": (">", "<=", ">="),
    ">": ("<", ">=", "<="),
    "<=": ("<", ">", ">="),
    ">=": (">", "<", "<="),
    "==": ("!=", ">"),
    "!=": ("==",),
}
_COMPARISONS = frozenset({"<", ">", "<=", ">=", "==", "!="})


@dataclass(frozen=True)
class Mutation:
    """A changed line and the kind of bug it is."""

    line: str
    kind: str  # "operator", "comparison", "assignment", "constant" or "variable"


def line_mutations(line: str, names: Collection[str]) -> list[Mutation]:
    """Every one-token change of ``line``; ``names`` are the variables that may be confused."""
    pieces = _PIECES.findall(line)
    found: list[Mutation] = []
    for index, piece in enumerate(pieces):
        following = pieces[index + 1] if index + 1 < len(pieces) else ""
        kind, others = _alternatives(piece, line, following, names)
        for other in others:
            changed = "".join([*pieces[:index], other, *pieces[index + 1 :]])
            found.append(Mutation(changed, kind))
    return found


def _alternatives(
    piece: str, line: str, following: str, names: Collection[str]
) -> tuple[str, tuple[str, ...]]:
    if piece in _OPERATORS:
        if piece in _COMPARISONS:
            return "comparison", _OPERATORS[piece]
        return ("assignment" if piece.endswith("=") else "operator"), _OPERATORS[piece]
    if piece.isdigit():
        number = int(piece)
        near = (number + 1, number + 2, number - 1) if number else (1, 2)
        return "constant", tuple(str(value) for value in near)
    # A loop header or a method call on another name could loop for ever or is no likely slip.
    if piece in names and not line.lstrip().startswith("for") and following != ".":
        return "variable", tuple(name for name in names if name != piece)
    return "", ()


def variable_names(body: Collection[str], args: Collection[str]) -> list[str]:
    """Arguments first, then names that the body assigns, in order of appearance."""
    names = list(args)
    for line in body:
        match = re.match(r"\s*(\w+) =", line) or re.match(r"\s*for (\w+) in", line)
        if match and match.group(1) not in names:
            names.append(match.group(1))
    return names
