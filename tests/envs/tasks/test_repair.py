"""Repair tasks: deterministic, truly broken, truly fixable, and held-out means unseen."""

import hashlib
from itertools import islice

import pytest

from envs.tasks.mutations import line_mutations, variable_names
from envs.tasks.repair import (
    NUM_HIDDEN,
    NUM_VISIBLE,
    Raised,
    RepairTask,
    generate,
    run_trusted,
    same_value,
    split_of,
    take,
)
from envs.tasks.repair_families import FAMILIES
from envs.tasks.syntax_mutations import KINDS

NUM_TASKS = 600


@pytest.fixture(scope="module")
def tasks() -> list[RepairTask]:
    return list(islice(generate(seed=1), NUM_TASKS))


def _failures(task: RepairTask, body: tuple[str, ...]) -> list[int]:
    results = run_trusted(task.specimen, body, [arguments for arguments, _ in task.cases])
    wanted = [value for _, value in task.cases]
    return [
        i
        for i, (got, want) in enumerate(zip(results, wanted, strict=True))
        if not same_value(got, want)
    ]


def test_same_seed_same_tasks() -> None:
    first = [task.to_task() for task in take(3, "train", 50)]
    assert first == [task.to_task() for task in take(3, "train", 50)]
    assert first != [task.to_task() for task in take(4, "train", 50)]


def test_a_longer_set_starts_with_the_shorter_one() -> None:
    assert [t.task_id for t in take(1, "heldout", 30)][:20] == [
        t.task_id for t in take(1, "heldout", 20)
    ]


def test_tests_fail_before_and_pass_after_the_fix(tasks: list[RepairTask]) -> None:
    for task in tasks:
        assert 0 in _failures(task, task.broken), "the first visible test must show the bug"
        assert _failures(task, task.fixed) == []


def test_one_line_differs(tasks: list[RepairTask]) -> None:
    for task in tasks:
        pairs = zip(task.broken, task.fixed, strict=True)
        assert [i for i, (a, b) in enumerate(pairs) if a != b] == [task.bug_line]


def test_every_family_and_kind_of_bug_appears(tasks: list[RepairTask]) -> None:
    assert {t.bug_kind for t in tasks} == {
        "operator",
        "comparison",
        "assignment",
        "constant",
        "variable",
    }
    assert len({t.specimen.name for t in tasks}) == len(FAMILIES) + 2  # two families have two names


def test_sides_are_disjoint_whatever_the_seed() -> None:
    """No function of one side is on another, also under other names for its variables."""
    functions = {
        split: {
            (t.specimen.name, t.specimen.semantics)
            for seed in (1, 2)
            for t in take(seed, split, 300)
        }
        for split in ("train", "heldout", "confirm")
    }
    assert not functions["train"] & functions["heldout"]
    assert not functions["train"] & functions["confirm"]
    assert not functions["heldout"] & functions["confirm"]


def test_side_ignores_variable_names(tasks: list[RepairTask]) -> None:
    sides: dict[tuple[str, str], set[str]] = {}
    for task in tasks:
        key = (task.specimen.name, task.specimen.semantics)
        sides.setdefault(key, set()).add(split_of(task.specimen))
    assert any(len(side) == 1 for side in sides.values())
    assert all(len(side) == 1 for side in sides.values())


def test_semantics_tell_functions_apart(tasks: list[RepairTask]) -> None:
    """Two specimens with the same semantics give the same values on the same inputs."""
    by_key: dict[tuple[str, str], RepairTask] = {}
    compared = 0
    for task in tasks:
        other = by_key.setdefault((task.specimen.name, task.specimen.semantics), task)
        if other is not task:
            compared += 1
            assert _failures(other, other.fixed) == []
            inputs = [arguments for arguments, _ in other.cases]
            ours = run_trusted(task.specimen, task.fixed, inputs)
            theirs = run_trusted(other.specimen, other.fixed, inputs)
            assert ours == theirs
    assert compared > 50


def test_task_is_a_repository_with_tests(tasks: list[RepairTask]) -> None:
    task = tasks[0].to_task()
    assert set(task.files) == {"README.md", "solution.py", "tests/test_visible.py"}
    assert len(task.expected) == NUM_HIDDEN
    assert task.files["tests/test_visible.py"].count(b"def test_") == NUM_VISIBLE
    hidden = task.hidden_files["tests/test_hidden.py"]
    assert hidden.count(b"def test_") == NUM_HIDDEN
    assert "tests/test_hidden.py" not in task.files


def test_solution_is_the_diff_of_the_bug(tasks: list[RepairTask]) -> None:
    task = tasks[0]
    text = task.to_task().solution.decode()
    assert f"-    {task.broken[task.bug_line]}" in text
    assert f"+    {task.fixed[task.bug_line]}" in text


def test_values_differ_by_type_too() -> None:
    assert not same_value(True, 1)
    assert not same_value([True], [1])
    assert same_value([1, 2], [1, 2])
    assert not same_value(Raised("TypeError"), 1)


def test_mutations_of_a_line() -> None:
    found = {(m.line, m.kind) for m in line_mutations("if v >= 3:", ["xs", "v"])}
    assert ("if v > 3:", "comparison") in found
    assert ("if v >= 4:", "constant") in found
    assert ("if xs >= 3:", "variable") in found
    assert all(line != "if v >= 3:" for line, _ in found)


def test_loop_headers_keep_their_names() -> None:
    assert line_mutations("for v in xs:", ["xs", "v", "t"]) == []


def test_names_in_order_of_appearance() -> None:
    assert variable_names(("t = 0", "for v in xs:", "    t += v"), ("xs",)) == ["xs", "t", "v"]


def test_code_that_would_never_end_is_not_run(tasks: list[RepairTask]) -> None:
    keep = next(task for task in tasks if task.specimen.name == "keep")
    xs, t = keep.specimen.args[0], keep.fixed[0].split(" ")[0]
    body = tuple(line.replace(f"{t}.append", f"{xs}.append") for line in keep.fixed)
    assert run_trusted(keep.specimen, body, [([30],)]) == [Raised("timeout")]


def test_code_that_adds_its_own_list_to_itself_is_not_run(tasks: list[RepairTask]) -> None:
    total = next(task for task in tasks if task.specimen.name == "total")
    xs = total.specimen.args[0]
    start, loop, _, last = total.fixed
    for line, wanted in ((f"{xs} += {xs} * 9", "timeout"), (f"{xs} += 9", "TypeError")):
        assert run_trusted(total.specimen, (start, loop, f"    {line}", last), [([2],)]) == [
            Raised(wanted)
        ]


def test_the_tasks_of_a_seed_stay_the_same() -> None:
    """Shipped policies and measured rates belong to these very tasks."""
    digest = hashlib.sha256()
    for side in ("train", "heldout"):
        for task in take(1, side, 500):
            digest.update(repr((task.task_id, task.broken, task.cases)).encode())
    assert digest.hexdigest() == "7fca30a75fa274085d501c1c8d97d166638811d52b7ee2fcd2087bcd1ecf9392"


def test_bugs_of_every_shared_kind() -> None:
    tasks = take(1, "train", 200, "syntax")
    kinds = {task.bug_kind for task in tasks}
    assert kinds <= set(KINDS)
    assert len(kinds) >= 8
    for task in tasks:
        pairs = zip(task.fixed, task.broken, strict=True)
        assert [number for number, (a, b) in enumerate(pairs) if a != b] == [task.bug_line]
        arguments, wanted = task.cases[0]
        (got,) = run_trusted(task.specimen, task.broken, [arguments])
        assert not same_value(got, wanted)
    again = take(1, "train", 20, "syntax")
    assert [task.task_id for task in again] == [task.task_id for task in tasks[:20]]


def test_lines_that_are_no_statement_have_no_bug() -> None:
    assert line_mutations("else:", ["a"]) == []
    assert [m.line for m in line_mutations("        return a", ["a", "b"])] == ["        return b"]
