"""The kinds of bugs: each function maps a node to the edits that spoil it in one way.

``comparisons``, ``operators``, ``assignments`` and ``integers`` make such functions from what may
stand in a thing's place; the kinds without a choice are plain functions.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from envs.tasks.syntax_source import Edit, Scope

Kind = Callable[[ast.AST, Scope], Iterator[Edit]]
Others = Mapping[str, tuple[str, ...]]  # an operator -> what may stand in its place

_COMPARISON_SYMBOLS: Mapping[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.In: "in",
    ast.NotIn: "not in",
    ast.Is: "is",
    ast.IsNot: "is not",
}
_ARITHMETIC_SYMBOLS: Mapping[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.BitXor: "^",
    ast.LShift: "<<",
    ast.RShift: ">>",
}
_COMPARISONS: Others = {
    "<": ("<=", ">"),
    "<=": ("<", ">="),
    ">": (">=", "<"),
    ">=": (">", "<="),
    "==": ("!=",),
    "!=": ("==",),
    "in": ("not in",),
    "not in": ("in",),
    "is": ("is not",),
    "is not": ("is",),
}
_ARITHMETIC: Others = {
    "+": ("-",),
    "-": ("+",),
    "*": ("+", "//"),
    "/": ("//", "*"),
    "//": ("/", "%"),
    "%": ("//",),
    "**": ("*",),
    "&": ("|",),
    "|": ("&",),
    "^": ("|",),
    "<<": (">>",),
    ">>": ("<<",),
}
_SIBLINGS: Mapping[str, tuple[str, ...]] = {
    "startswith": ("endswith",),
    "endswith": ("startswith",),
    "lower": ("upper",),
    "upper": ("lower",),
    "strip": ("lstrip", "rstrip"),
    "lstrip": ("rstrip",),
    "rstrip": ("lstrip",),
    "split": ("rsplit",),
    "rsplit": ("split",),
    "partition": ("rpartition",),
    "rpartition": ("partition",),
    "find": ("rfind",),
    "rfind": ("find",),
    "append": ("extend",),
    "extend": ("append",),
    "keys": ("values",),
    "values": ("keys",),
    "update": ("setdefault",),
    "setdefault": ("get",),
    "union": ("intersection",),
    "intersection": ("union",),
    "isdigit": ("isalnum",),
    "isalpha": ("isalnum",),
    "match": ("fullmatch", "search"),
    "search": ("match",),
    "popleft": ("pop",),
    "min": ("max",),
    "max": ("min",),
    "any": ("all",),
    "all": ("any",),
    "floor": ("ceil",),
    "ceil": ("floor",),
    "sorted": ("list",),
    "reversed": ("list",),
    "abs": ("int",),
    "isinstance": ("issubclass",),
}
_EXCEPTIONS: Mapping[str, str] = {
    "KeyError": "IndexError",
    "IndexError": "KeyError",
    "ValueError": "TypeError",
    "TypeError": "ValueError",
    "AttributeError": "KeyError",
    "StopIteration": "ValueError",
    "OSError": "ValueError",
}


def comparisons(others: Others) -> Kind:
    """Put in another comparison, one link of a chain at a time."""

    def kind(node: ast.AST, scope: Scope) -> Iterator[Edit]:
        if not isinstance(node, ast.Compare):
            return
        operands = [node.left, *node.comparators]
        for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
            symbol = _COMPARISON_SYMBOLS[type(operator)]
            pattern = r"\s+".join(re.escape(word) for word in symbol.split())
            yield from _operator(scope, left, right, pattern, others.get(symbol, ()))

    return kind


def operators(others: Others) -> Kind:
    """Put in another arithmetic operator."""

    def kind(node: ast.AST, scope: Scope) -> Iterator[Edit]:
        if not isinstance(node, ast.BinOp):
            return
        if isinstance(node.op, ast.Mod) and _is_text(node.left):
            return  # string formatting
        symbol = _ARITHMETIC_SYMBOLS.get(type(node.op), "")
        changed = others.get(symbol, ())
        yield from _operator(scope, node.left, node.right, re.escape(symbol), changed)

    return kind


def assignments(others: Others) -> Kind:
    """Put in another augmented assignment; ``others`` lacks the equals sign, "" is a plain one."""

    def kind(node: ast.AST, scope: Scope) -> Iterator[Edit]:
        if not isinstance(node, ast.AugAssign):
            return
        symbol = _ARITHMETIC_SYMBOLS.get(type(node.op), "")
        changed = [f"{other}=" for other in others.get(symbol, ())]
        yield from _operator(scope, node.target, node.value, re.escape(f"{symbol}="), changed)

    return kind


def integers(others: Callable[[int], Sequence[int]]) -> Kind:
    """Put in another number."""

    def kind(node: ast.AST, scope: Scope) -> Iterator[Edit]:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            for value in others(node.value):
                yield scope.source.replace(node, str(value) if value >= 0 else f"({value})")

    return kind


comparison = comparisons(_COMPARISONS)
arithmetic = operators(_ARITHMETIC)
augmented = assignments({symbol: (*changed, "") for symbol, changed in _ARITHMETIC.items()})
integer = integers(lambda value: (value + 1, value - 1))


def boolean(node: ast.AST, scope: Scope) -> Iterator[Edit]:
    if not isinstance(node, ast.BoolOp):
        return
    word, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
    for left, right in zip(node.values, node.values[1:], strict=False):
        yield from _operator(scope, left, right, word, (other,))
        yield Edit(scope.source.start(left), scope.source.start(right), "")
        yield Edit(scope.source.end(left), scope.source.end(right), "")


def negation(node: ast.AST, scope: Scope) -> Iterator[Edit]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield scope.source.replace(node, f"({scope.source.text(node.operand)})")


def condition(node: ast.AST, scope: Scope) -> Iterator[Edit]:
    if isinstance(node, ast.If | ast.IfExp):
        yield scope.source.replace(node.test, f"not ({scope.source.text(node.test)})")
    if isinstance(node, ast.comprehension):
        for test in node.ifs:
            yield scope.source.replace(test, f"not ({scope.source.text(test)})")
            yield scope.source.replace(test, "True")


def ternary(node: ast.AST, scope: Scope) -> Iterator[Edit]:
    if isinstance(node, ast.IfExp):
        text = scope.source.text
        swapped = f"({text(node.orelse)}) if {text(node.test)} else ({text(node.body)})"
        yield scope.source.replace(node, swapped)


def truth(node: ast.AST, scope: Scope) -> Iterator[Edit]:
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield scope.source.replace(node, str(not node.value))


def text(node: ast.AST, scope: Scope) -> Iterator[Edit]:
    if not (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)):
        return
    value = node.value
    if not value or "\n" in scope.source.text(node) or len(value) > 40:
        return
    yield scope.source.replace(node, repr(value[:-1]))
    if value.swapcase() != value:
        yield scope.source.replace(node, repr(value.swapcase()))


def index(node: ast.AST, scope: Scope) -> Iterator[Edit]:
    if not isinstance(node, ast.Subscript) or not isinstance(node.ctx, ast.Load):
        return
    match node.slice:
        case ast.Constant(value=int(number)) if type(number) is int:
            yield scope.source.replace(node.slice, "-1" if number == 0 else "0")
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=1)):
            yield scope.source.replace(node.slice, "0")
        case _:
            return


def slice_bound(node: ast.AST, scope: Scope) -> Iterator[Edit]:
    if not isinstance(node, ast.Slice):
        return
    for bound in (node.lower, node.upper):
        if bound is not None:
            yield scope.source.replace(bound, "")
            yield scope.source.replace(bound, f"({scope.source.text(bound)}) + 1")


def range_bound(node: ast.AST, scope: Scope) -> Iterator[Edit]:
    if isinstance(node, ast.Call) and _called(node) == "range" and 1 <= len(node.args) <= 2:
        stop = node.args[-1]
        for change in ("- 1", "+ 1"):
            yield scope.source.replace(stop, f"{scope.source.text(stop)} {change}")


def sibling_call(node: ast.AST, scope: Scope) -> Iterator[Edit]:
    if not isinstance(node, ast.Call):
        return
    name = _called(node)
    end = scope.source.end(node.func)
    for other in _SIBLINGS.get(name, ()):
        yield Edit(end - len(name.encode()), end, other)


def swapped_arguments(node: ast.AST, scope: Scope) -> Iterator[Edit]:
    if not isinstance(node, ast.Call):
        return
    for first, second in zip(node.args, node.args[1:], strict=False):
        if isinstance(first, ast.Starred) or isinstance(second, ast.Starred):
            continue
        start, end = scope.source.start(first), scope.source.end(second)
        gap = scope.source.between(scope.source.end(first), scope.source.start(second))
        yield Edit(start, end, f"{scope.source.text(second)}{gap}{scope.source.text(first)}")


def dropped_keyword(node: ast.AST, scope: Scope) -> Iterator[Edit]:
    if not isinstance(node, ast.Call):
        return
    arguments: list[ast.AST] = [*node.args, *node.keywords]
    for keyword in node.keywords:
        position = arguments.index(keyword)
        if position:
            start = scope.source.end(arguments[position - 1])
            yield Edit(start, scope.source.end(keyword), "")
        elif len(arguments) == 1:
            yield scope.source.replace(keyword, "")


def wrong_name(node: ast.AST, scope: Scope) -> Iterator[Edit]:
    if not (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)):
        return
    names = scope.names
    if node.id not in names:
        return
    place = names.index(node.id)
    others = [*names[place + 1 :], *names[:place]][:2]  # a few: functions have many names
    for other in others:
        yield scope.source.replace(node, other)


def returned_value(node: ast.AST, scope: Scope) -> Iterator[Edit]:
    if isinstance(node, ast.Return) and node.value is not None:
        yield scope.source.replace(node.value, "None")


def dropped_guard(node: ast.AST, scope: Scope) -> Iterator[Edit]:
    """Drop an ``if`` without ``else`` whose body leaves the function, the loop or raises."""
    if not isinstance(node, ast.If) or node.orelse:
        return
    if isinstance(node.body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break):
        yield scope.source.replace(node, "pass")


def dropped_statement(node: ast.AST, scope: Scope) -> Iterator[Edit]:
    droppable = (ast.AugAssign, ast.Raise, ast.Delete)
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    stores = isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name)
    if is_call or stores or isinstance(node, droppable):
        yield scope.source.replace(node, "pass")


def dropped_else(node: ast.AST, scope: Scope) -> Iterator[Edit]:
    if not isinstance(node, ast.If) or not node.orelse:
        return
    if isinstance(node.orelse[0], ast.If) and scope.source.text(node.orelse[0])[:4] == "elif":
        return
    start, end = scope.source.start(node.orelse[0]), scope.source.end(node.orelse[-1])
    yield Edit(start, end, "pass")


def loop_control(node: ast.AST, scope: Scope) -> Iterator[Edit]:
    if isinstance(node, ast.Break):
        yield scope.source.replace(node, "continue")
    if isinstance(node, ast.Continue):
        yield scope.source.replace(node, "break")


def exception_type(node: ast.AST, scope: Scope) -> Iterator[Edit]:
    caught: Sequence[ast.expr] = ()
    if isinstance(node, ast.ExceptHandler) and node.type is not None:
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        caught = [node.exc.func]
    for name in caught:
        if isinstance(name, ast.Name) and name.id in _EXCEPTIONS:
            yield scope.source.replace(name, _EXCEPTIONS[name.id])


def default_value(node: ast.AST, scope: Scope) -> Iterator[Edit]:
    if not isinstance(node, ast.arguments):
        return
    for default in [*node.defaults, *node.kw_defaults]:
        if isinstance(default, ast.Constant) and default.value is not None:
            yield scope.source.replace(default, "None")


def _operator(
    scope: Scope, left: ast.AST, right: ast.AST, pattern: str, others: Sequence[str]
) -> Iterator[Edit]:
    """Replace the operator that stands between two operands; brackets around them may too."""
    start, end = scope.source.end(left), scope.source.start(right)
    gap = scope.source.between(start, end)
    match = re.fullmatch(rf"([\s)\\]*)({pattern})([\s(\\]*)", gap)
    if match is None:  # a comment stands there
        return
    before, after = len(match.group(1).encode()), len(match.group(3).encode())
    for other in others:
        yield Edit(start + before, end - after, other)


def _called(node: ast.Call) -> str:
    match node.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )
