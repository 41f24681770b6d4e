"""Bugs as small edits of a syntax tree: every way to spoil Python source that tasks are made from.

An edit replaces the text of one node and leaves the rest of the file byte for byte, so the gold
patch is as small as a person's. Bugs are put into function bodies only; docstrings, annotations,
decorators and ``if TYPE_CHECKING`` blocks stay as they are.

A kind of bug is a function from a node to edits; ``KINDS`` names them all.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from envs.errors import TaskError
from envs.tasks import syntax_kinds as kinds
from envs.tasks.syntax_source import Edit, Scope, Source

KINDS: Mapping[str, kinds.Kind] = {
    "comparison": kinds.comparison,
    "arithmetic": kinds.arithmetic,
    "augmented": kinds.augmented,
    "boolean": kinds.boolean,
    "negation": kinds.negation,
    "condition": kinds.condition,
    "ternary": kinds.ternary,
    "integer": kinds.integer,
    "truth": kinds.truth,
    "text": kinds.text,
    "index": kinds.index,
    "slice": kinds.slice_bound,
    "range": kinds.range_bound,
    "sibling_call": kinds.sibling_call,
    "swapped_arguments": kinds.swapped_arguments,
    "dropped_keyword": kinds.dropped_keyword,
    "wrong_name": kinds.wrong_name,
    "returned_value": kinds.returned_value,
    "dropped_guard": kinds.dropped_guard,
    "dropped_statement": kinds.dropped_statement,
    "dropped_else": kinds.dropped_else,
    "loop_control": kinds.loop_control,
    "exception_type": kinds.exception_type,
    "default_value": kinds.default_value,
}


@dataclass(frozen=True)
class Site:
    """A possible bug: its place and its change. It is not known yet whether the result parses.

    ``line`` counts from 1 in the correct file; ``function`` is the dotted name of the innermost
    function; ``before`` and ``after`` are the changed pieces of source.
    """

    kind: str
    function: str
    line: int
    before: str
    after: str
    edit: Edit


def find_sites(content: bytes, kinds_wanted: tuple[str, ...] = ()) -> list[Site]:
    """Find every site of a Python file, in source order; no kinds means all of them.

    Raises TaskError when the file does not parse or a kind is unknown. Costs one parse.
    """
    check_kinds(kinds_wanted)
    source = Source(content)
    wanted = {name: KINDS[name] for name in kinds_wanted or KINDS}
    return [
        _site(name, scope, source, edit)
        for node, scope in _function_nodes(source.parse(), source)
        for name, make in wanted.items()
        for edit in make(node, scope)
    ]


def apply_site(content: bytes, site: Site) -> bytes | None:
    """Put the bug into the file; None where that is not Python or means the same."""
    changed = Source(content).apply(site.edit)
    try:
        same = ast.dump(ast.parse(changed)) == ast.dump(ast.parse(content))
    except (SyntaxError, ValueError, RecursionError):
        return None
    return None if same else changed


def _site(name: str, scope: Scope, source: Source, edit: Edit) -> Site:
    before = source.content[edit.start : edit.end].decode("utf-8", "replace")
    line = source.content.count(b"\n", 0, edit.start) + 1
    return Site(name, scope.function, line, before, edit.text, edit)


def _function_nodes(tree: ast.Module, source: Source) -> Iterator[tuple[ast.AST, Scope]]:
    """Yield nodes inside functions with what surrounds them, outermost first."""
    stack: list[tuple[ast.AST, str, Scope | None]] = [(tree, "", None)]
    while stack:
        node, prefix, scope = stack.pop()
        if scope is not None:
            yield node, scope
        children: list[tuple[ast.AST, str, Scope | None]] = []
        for child in _children(node):
            name = getattr(child, "name", "")
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                inner = f"{prefix}{name}"
                children.append((child, f"{inner}.", Scope(source, inner, child)))
            elif isinstance(child, ast.ClassDef):
                children.append((child, f"{prefix}{name}.", None))
            else:
                children.append((child, prefix, scope))
        stack += reversed(children)


def _children(node: ast.AST) -> list[ast.AST]:
    """Return child nodes to spoil: no annotations, decorators, docstrings or typing blocks."""
    skipped: set[ast.AST | None] = set()
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        skipped |= {*node.decorator_list, node.returns}
    if isinstance(node, ast.ClassDef):
        skipped |= {*node.decorator_list}
    if isinstance(node, ast.arg):
        skipped.add(node.annotation)
    if isinstance(node, ast.AnnAssign):
        skipped.add(node.annotation)
    if isinstance(node, ast.JoinedStr | ast.Expr) and not _has_effect(node):
        return []
    children = [child for child in ast.iter_child_nodes(node) if child not in skipped]
    return [child for child in children if not _is_typing_block(child)]


def _is_typing_block(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _has_effect(node: ast.JoinedStr | ast.Expr) -> bool:
    # pieces of an f-string have no positions of their own before Python 3.12
    return isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)


def check_kinds(names: tuple[str, ...]) -> None:
    """Raise TaskError for a name that is no kind of bug."""
    unknown = sorted(set(names) - set(KINDS))
    if unknown:
        raise TaskError(f"unknown kinds of bugs: got={unknown} expected some of {sorted(KINDS)}")
