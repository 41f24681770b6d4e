"""Grading of a patch from base files, the patch's source changes and the hidden tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from envs.base import Score, Task
from envs.errors import InfrastructureError, PatchError, TaskError
from envs.grading.suite import SuiteReport, SuiteRunner
from envs.patches.apply import apply_patch, touched_paths
from envs.paths import is_protected

MAX_PATCH_BYTES = 2 << 20
MAX_NEW_NODES = 2000
"""Files and folders that a patch may add. A patch that fills the grading sandbox must be a graded
0: as infrastructure trouble it would let an agent choose which episodes count."""


@dataclass(frozen=True)
class GradingTree:
    """The content of a grading sandbox: sources without the judged tests, and those tests."""

    files: dict[str, bytes]
    tests: dict[str, bytes]
    protected_touched: tuple[str, ...]


def grade(task: Task, patch: bytes, runner: SuiteRunner) -> Score:
    """Judge ``patch``, and nothing else that the agent did. Never raises for infrastructure.

    The reward is 1 exactly when the hidden tests report the expected names, each with its
    expected status, and 0 otherwise; changes of protected files are undone and reported.
    """
    if not patch:
        return Score(0.0, "graded", "empty patch")
    if len(patch) > MAX_PATCH_BYTES:
        return Score(0.0, "graded", f"patch of {len(patch)} bytes, at most {MAX_PATCH_BYTES}")
    try:
        tree = grading_tree(task, patch)
    except PatchError as error:
        return Score(0.0, "graded", f"patch: {error}")
    if tree.files == _sources(task):
        reason = "the patch changes protected files only"
        return Score(0.0, "graded", reason, protected_touched=tree.protected_touched)
    try:
        report = runner.run(tree.files, tree.tests)
    except InfrastructureError as error:
        return Score(None, "infrastructure", str(error), protected_touched=tree.protected_touched)
    return _score(task, report, tree.protected_touched)


def grading_tree(task: Task, patch: bytes) -> GradingTree:
    """Apply the patch and put every protected file back. Raises PatchError."""
    patched = apply_patch(task.files, patch)
    num_new = len(_nodes(patched) - _nodes(task.files))
    if num_new > MAX_NEW_NODES:
        raise PatchError(f"too many new files and folders: got={num_new} at most {MAX_NEW_NODES}")
    touched = tuple(path for path in touched_paths(patch) if _is_guarded(task, path))
    files = {path: data for path, data in patched.items() if not _is_guarded(task, path)}
    files |= {path: data for path, data in task.files.items() if _is_guarded(task, path)}
    tests = _judged_tests(task)
    sources = {path: data for path, data in files.items() if path not in _test_paths(task)}
    return GradingTree(sources, tests, touched)


def _nodes(tree: Mapping[str, bytes]) -> set[str]:
    """Return every file and every folder above one."""
    nodes: set[str] = set()
    for path in tree:
        while path and path not in nodes:
            nodes.add(path)
            path = path.rpartition("/")[0]
    return nodes


def _is_guarded(task: Task, path: str) -> bool:
    return path in _test_paths(task) or is_protected(path, task.protected)


def _test_paths(task: Task) -> frozenset[str]:
    return frozenset((*task.visible_tests, *task.hidden_files))


def _sources(task: Task) -> dict[str, bytes]:
    return {path: data for path, data in task.files.items() if path not in _test_paths(task)}


def _judged_tests(task: Task) -> dict[str, bytes]:
    """Return the files that the expected names are in. Raises TaskError when one is nowhere."""
    available: Mapping[str, bytes] = {**task.files, **task.hidden_files}
    paths = sorted({name.partition("::")[0] for name in task.expected})
    missing = [path for path in paths if path not in available]
    if missing or not paths:
        raise TaskError(
            f"task {task.task_id} expects tests of files that it lacks: got={missing or 'none'}"
            f" expected some of {sorted(available)}"
        )
    return {path: available[path] for path in paths}


def _score(task: Task, report: SuiteReport, touched: tuple[str, ...]) -> Score:
    right = sum(report.statuses.get(name) == wanted for name, wanted in task.expected.items())
    wrong = len(task.expected) - right
    unexpected = sorted(report.statuses.keys() - task.expected.keys())
    solved = report.complete and wrong == 0 and not unexpected
    reason = (
        "all tests as expected" if solved else f"{wrong} of {right + wrong} tests not as expected"
    )
    if not report.complete:
        reason += "; the test run broke off"
    if unexpected:
        reason += f"; tests nobody asked for: {unexpected[:5]}"
    return Score(float(solved), "graded", reason, right, wrong, touched, test_log=report.log)
