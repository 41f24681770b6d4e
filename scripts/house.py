"""Print the figures of the house: ``python scripts/house.py [TREE]``, for this tree or another.

Rooms and files at the top of ``agent_rl``, circles of imports, lines, the longest function, the
length of the loop, docstrings that do not open with a verb or a noun, file names used twice.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("agent_rl", "envs", "eval", "routing_cache")
_UNCLEAR = re.compile(r"(What|Whether|How|Which|Where|When|Who|Why)\b")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def files(tree: Path) -> dict[str, Path]:
    """Return every module of the product by its dotted name."""
    found: dict[str, Path] = {}
    for package in PACKAGES:
        for path in sorted((tree / package).rglob("*.py")):
            parts = path.relative_to(tree).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(parsed: ast.Module, modules: dict[str, Path]) -> set[str]:
    """Return the modules that a module imports, inside functions too."""
    named: set[str] = set()
    for node in ast.walk(parsed):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                named.add(inner if inner in modules else node.module)
        elif isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
    return named & modules.keys()


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the sets of modules that reach each other."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for module in graph[waiting.pop()] - seen:
                seen.add(module)
                waiting.append(module)
        return seen

    reach = {module: reached(module) for module in graph}
    found: list[set[str]] = []
    for module in graph:
        circle = {other for other in reach[module] if module in reach[other]}
        if circle and circle not in found:
            found.append(circle)
    return found


def documented(parsed: ast.Module) -> Iterator[str]:
    """Yield every docstring of a module."""
    for node in ast.walk(parsed):
        if isinstance(node, ast.Module | ast.ClassDef | _Function) and (
            text := ast.get_docstring(node)
        ):
            yield text


def main(tree: Path) -> None:
    """Print one line per figure."""
    modules = files(tree)
    parsed = {name: ast.parse(path.read_text()) for name, path in modules.items()}
    graph = {name: imports(module, modules) - {name} for name, module in parsed.items()}
    functions = [
        (node.end_lineno - node.lineno + 1, f"{modules[name].relative_to(tree)}:{node.name}")
        for name, module in parsed.items()
        for node in ast.walk(module)
        if isinstance(node, _Function) and node.end_lineno is not None
    ]
    texts = [text for module in parsed.values() for text in documented(module)]
    top = [p for p in (tree / "agent_rl").iterdir() if p.name not in ("__init__.py", "__pycache__")]
    names = Counter((path.relative_to(tree).parts[0], path.name) for path in modules.values())
    twice = {name for (_, name), count in names.items() if count > 1 and name != "__init__.py"}
    loop = next(n for n, where in functions if where.endswith("loop.py:train_steps"))
    lines = sum(len(path.read_text().splitlines()) for path in modules.values())
    print(f"rooms at the top of agent_rl    {sum(p.is_dir() for p in top) - 1} and assets")
    print(f"files at the top of agent_rl    {sum(p.is_file() for p in top)}")
    print(f"circles of imports              {len(circles(graph))}")
    print(f"product lines                   {lines:,} in {len(modules)} files")
    print(f"longest function                {max(functions)}")
    print(f"functions over 40 lines         {sum(n > 40 for n, _ in functions)}")
    print(f"lines of train_steps            {loop}")
    print(f"docstrings that ask a question  {sum(bool(_UNCLEAR.match(t)) for t in texts)}")
    print(f"docstrings                      {len(texts):,}")
    print(f"file names used twice           {len(twice)}: {', '.join(sorted(twice))}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
