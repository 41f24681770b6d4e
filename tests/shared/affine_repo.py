"""A small repository in the embedded tasks' form, for tests of everything around it."""

from __future__ import annotations

from dataclasses import replace

from envs.base import Task
from envs.patches.diff import diff_trees

BROKEN = b"def affine(x):\n    t = x * 2\n    return t + 4\n"
FIXED = b"def affine(x):\n    t = x * 3\n    return t + 4\n"


def case_file(*cases: tuple[int, int]) -> bytes:
    parts = ["from solution import affine\n"]
    for number, (argument, wanted) in enumerate(cases):
        parts.append(f"\n\ndef test_{number}():\n    assert affine({argument}) == {wanted}\n")
    return "".join(parts).encode()


VISIBLE = case_file((1, 7), (2, 10))
HIDDEN = case_file((1, 7), (2, 10), (-3, -5), (0, 4))


def affine_task(**changes: object) -> Task:
    """``affine(x)`` should be ``3 * x + 4`` and multiplies by 2."""
    files = {
        "README.md": b"# affine\n",
        "solution.py": BROKEN,
        "tests/test_visible.py": VISIBLE,
    }
    task = Task(
        task_id="affine",
        issue="fix affine : x times 3 plus 4",
        files=files,
        focus_path="solution.py",
        visible_tests=("tests/test_visible.py",),
        hidden_files={"tests/test_hidden.py": HIDDEN},
        expected={f"tests/test_hidden.py::test_{i}": "PASSED" for i in range(4)},
        solution=diff_trees(files, {**files, "solution.py": FIXED}).patch,
    )
    return replace(task, **changes)  # pyright: ignore[reportArgumentType]
