"""Repair tasks: a small repository with one injected bug, its tests and an issue.

Everything is drawn from a seed. Which side a task is on (train, held-out, confirmation) is decided
by a hash of what its correct function computes, names left out: the sides are disjoint by
construction, and a held-out task is never a renamed training task.
"""

from __future__ import annotations

import difflib
import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from envs.base import Task
from envs.tasks.mutations import Mutation, line_mutations, variable_names
from envs.tasks.repair_families import FAMILIES, Specimen, Value
from envs.tasks.syntax_mutations import apply_site, find_sites

Split = Literal["train", "heldout", "confirm"]
Bugs = Literal["token", "syntax"]  # one token of a line, or any kind of the shared syntax bugs
SOURCE_PATH = "solution.py"
VISIBLE_PATH = "tests/test_visible.py"
HIDDEN_PATH = "tests/test_hidden.py"
NUM_VISIBLE = 5
NUM_HIDDEN = 10
_INDENT = "    "
_NUM_BUCKETS = 8  # one eighth of all functions is held out, another eighth is for confirmation


@dataclass(frozen=True)
class RepairTask:
    """A task with all that its generator knows; ``to_task`` is what an environment gets.

    ``broken`` and ``fixed`` are body lines without the function's indentation; ``bug_line`` is the
    index of the one line in which they differ. ``cases`` are (arguments, wanted value) pairs, the
    first ``NUM_VISIBLE`` of them visible.
    """

    specimen: Specimen
    broken: tuple[str, ...]
    bug_line: int
    bug_kind: str
    cases: tuple[tuple[tuple[Value, ...], Value], ...]

    @property
    def fixed(self) -> tuple[str, ...]:
        return self.specimen.body

    @property
    def split(self) -> Split:
        return split_of(self.specimen)

    @property
    def task_id(self) -> str:
        content = "\n".join((self.specimen.statement, *self.broken))
        return f"repair-{self.specimen.name}-{_digest(content)[:12]}"

    @property
    def issue(self) -> str:
        return f"fix {self.specimen.name} : {self.specimen.statement}"

    def source(self, body: Sequence[str]) -> str:
        """Return the source file with ``body`` as the function's body."""
        return _source(self.specimen, body)

    def to_task(self) -> Task:
        broken, fixed = self.source(self.broken), self.source(self.fixed)
        return Task(
            task_id=self.task_id,
            issue=self.issue,
            files={
                "README.md": f"# {self.specimen.name}\n\n{self.specimen.statement}\n".encode(),
                SOURCE_PATH: broken.encode(),
                VISIBLE_PATH: self._tests(self.cases[:NUM_VISIBLE]),
            },
            focus_path=SOURCE_PATH,
            visible_tests=(VISIBLE_PATH,),
            hidden_files={HIDDEN_PATH: self._tests(self.cases)},
            expected={f"{HIDDEN_PATH}::test_{i}": "PASSED" for i in range(len(self.cases))},
            solution=_unified_diff(SOURCE_PATH, broken, fixed),
            metadata={
                "family": self.specimen.name,
                "bug_kind": self.bug_kind,
                "split": self.split,
            },
        )

    def _tests(self, cases: Sequence[tuple[tuple[Value, ...], Value]]) -> bytes:
        name = self.specimen.name
        parts = [f"from {SOURCE_PATH.removesuffix('.py')} import {name}\n"]
        for index, (arguments, wanted) in enumerate(cases):
            call = f"{name}({', '.join(repr(value) for value in arguments)})"
            parts.append(f"\n\ndef test_{index}():\n    assert {call} == {wanted!r}\n")
        return "".join(parts).encode()


def _source(specimen: Specimen, body: Sequence[str]) -> str:
    lines = (f"{_INDENT}{line}\n" for line in body)
    return f"def {specimen.name}({', '.join(specimen.args)}):\n" + "".join(lines)


def split_of(specimen: Specimen) -> Split:
    """Return the side that a function belongs to, whatever its variables are called."""
    bucket = int(_digest(f"{specimen.name} {specimen.semantics}"), 16) % _NUM_BUCKETS
    return "heldout" if bucket == 0 else "confirm" if bucket == 1 else "train"


def generate(seed: int, split: Split | None = None, bugs: Bugs = "token") -> Iterator[RepairTask]:
    """Yield unique tasks of one side (None: all) without end, the same for the same seed."""
    rng = random.Random(seed)
    seen: set[str] = set()
    while True:
        task = _draw(rng, bugs)
        if task is None or (split is not None and task.split != split) or task.task_id in seen:
            continue
        seen.add(task.task_id)
        yield task


def take(seed: int, split: Split, num_tasks: int, bugs: Bugs = "token") -> list[RepairTask]:
    """Return the first ``num_tasks`` tasks of a side."""
    stream = generate(seed, split, bugs)
    return [next(stream) for _ in range(num_tasks)]


def _draw(rng: random.Random, bugs: Bugs) -> RepairTask | None:
    """Draw one task; None when no drawn bug makes a test fail."""
    specimen = rng.choice(FAMILIES)(rng)
    inputs = [specimen.draw_inputs(rng) for _ in range(NUM_HIDDEN)]
    wanted = run_trusted(specimen, specimen.body, inputs)
    if any(isinstance(value, Raised) for value in wanted):
        return None
    candidates = _token_bugs(specimen) if bugs == "token" else _syntax_bugs(specimen)
    rng.shuffle(candidates)
    for number, mutation in candidates[:4]:
        broken = (*specimen.body[:number], mutation.line, *specimen.body[number + 1 :])
        got = run_trusted(specimen, broken, inputs)
        failing = [i for i in range(NUM_HIDDEN) if not same_value(got[i], wanted[i])]
        if failing:
            # The first visible test fails, so running the tests always says something.
            order = [failing[0], *(i for i in range(NUM_HIDDEN) if i != failing[0])]
            cases = tuple((inputs[i], _value(wanted[i])) for i in order)
            return RepairTask(specimen, broken, number, mutation.kind, cases)
    return None


def _token_bugs(specimen: Specimen) -> list[tuple[int, Mutation]]:
    names = variable_names(specimen.body, specimen.args)
    return [
        (number, mutation)
        for number, line in enumerate(specimen.body)
        for mutation in line_mutations(line, names)
    ]


def _syntax_bugs(specimen: Specimen) -> list[tuple[int, Mutation]]:
    """Return bugs of every shared kind that change one line."""
    source = _source(specimen, specimen.body).encode()
    before = source.decode().splitlines()
    found: list[tuple[int, Mutation]] = []
    for site in find_sites(source):
        changed = apply_site(source, site)
        after = [] if changed is None else changed.decode().splitlines()
        differing = [
            n for n, pair in enumerate(zip(before, after, strict=False)) if len(set(pair)) > 1
        ]
        if len(after) == len(before) and len(differing) == 1 and differing[0] > 0:
            line = after[differing[0]].removeprefix(_INDENT)
            found.append((differing[0] - 1, Mutation(line, site.kind)))
    return found


@dataclass(frozen=True)
class Raised:
    """A call that did not return: the exception's name, or "timeout"."""

    error: str


def run_trusted(
    specimen: Specimen, body: Sequence[str], inputs: Sequence[tuple[Value, ...]]
) -> list[Value | Raised]:
    """Run generator-made code in this process and return its results.

    Only for code that this module wrote itself; what a policy writes goes to a sandbox. A body
    that grows the list it iterates over is recognised and never run: two slips in one line can
    make ``xs += xs * 9``, which doubles the memory until there is none.
    """
    code = "\n".join(
        (f"def {specimen.name}({', '.join(specimen.args)}):", *(f"    {x}" for x in body))
    )
    loop = re.search(r"for \w+ in (\w+):", code)
    if loop and _grows(loop.group(1), code):
        return [Raised("timeout")] * len(inputs)
    namespace: dict[str, object] = {}
    try:
        exec(code, namespace)
    except SyntaxError as error:
        return [Raised(type(error).__name__)] * len(inputs)
    function = namespace[specimen.name]
    assert callable(function)
    results: list[Value | Raised] = []
    for arguments in inputs:
        try:
            fresh = [list(a) if isinstance(a, list) else a for a in arguments]
            results.append(function(*fresh))  # pyright: ignore[reportArgumentType]
        except (
            ArithmeticError,
            LookupError,
            NameError,
            TypeError,
            ValueError,
            AttributeError,
        ) as error:
            results.append(Raised(type(error).__name__))
    return results


def _grows(name: str, code: str) -> bool:
    """Tell whether ``code`` appends to the list ``name`` or adds a multiple of it to itself.

    ``name += number`` does not count: it raises a TypeError.
    """
    added = rf"\b{name} \+= .*\b{name}\b"
    return f"{name}.append(" in code or re.search(added, code) is not None


def same_value(left: Value | Raised, right: Value | Raised) -> bool:
    """Compare value and type, also inside lists: ``True`` is not ``1``."""
    return repr(left) == repr(right)


def _value(result: Value | Raised) -> Value:
    assert not isinstance(result, Raised)
    return result


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _unified_diff(path: str, before: str, after: str) -> bytes:
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{path}", f"b/{path}"
    )
    return "".join((f"diff --git a/{path} b/{path}\n", *lines)).encode()
