"""Python source as bytes with the positions of its syntax tree, and edits of it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cached_property

from envs.errors import TaskError


@dataclass(frozen=True)
class Edit:
    """A replacement of bytes ``[start, end)`` of a file by ``text``."""

    start: int
    end: int
    text: str


class Source:
    """A file and the byte offsets of its lines. Positions of ``ast`` are UTF-8 byte columns."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self._starts = [0]
        for line in content.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def parse(self) -> ast.Module:
        """Return the syntax tree. Raises TaskError for what is not UTF-8 Python."""
        try:
            self.content.decode("utf-8")
            return ast.parse(self.content)
        except (SyntaxError, ValueError, RecursionError) as error:
            raise TaskError(f"not Python in UTF-8: got={error}") from error

    def start(self, node: ast.AST) -> int:
        return self._offset(node, "lineno", "col_offset")

    def end(self, node: ast.AST) -> int:
        return self._offset(node, "end_lineno", "end_col_offset")

    def text(self, node: ast.AST) -> str:
        return self.content[self.start(node) : self.end(node)].decode("utf-8")

    def between(self, left: int, right: int) -> str:
        return self.content[left:right].decode("utf-8", "replace")

    def replace(self, node: ast.AST, text: str) -> Edit:
        return Edit(self.start(node), self.end(node), text)

    def apply(self, edit: Edit) -> bytes:
        return self.content[: edit.start] + edit.text.encode("utf-8") + self.content[edit.end :]

    def _offset(self, node: ast.AST, line: str, column: str) -> int:
        number: int = getattr(node, line)
        offset: int = getattr(node, column)
        return self._starts[number - 1] + offset


@dataclass(frozen=True)
class Scope:
    """The surroundings of a node: its file and the innermost function, or the tree without one."""

    source: Source
    function: str
    node: ast.AST

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Arguments and assigned names of the function, sorted."""
        found = {argument.arg for argument in ast.walk(self.node) if isinstance(argument, ast.arg)}
        for node in ast.walk(self.node):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
        return tuple(sorted(found - {"self", "cls"}))
