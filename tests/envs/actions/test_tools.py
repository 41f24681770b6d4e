"""The tools over a work tree: calls, and refusals that change nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from affine_repo import BROKEN, affine_task

from envs.actions import CallError, ToolCall
from envs.actions import workspace_tools as t
from envs.base import ExecResult
from envs.errors import WorkspaceError
from envs.grading.case_runner import CaseRunner
from envs.grading.suite import SuiteReport
from envs.sandbox.launch import SandboxSpec
from envs.sandbox.worker_sandbox import WorkerSandbox
from envs.workspace import Workspace

TASK = affine_task()
LIMITS = t.ToolLimits(max_lines=5, bash_timeout_s=1.0, output_cap_bytes=1000)


def view(path: str, start: int = 1, end: int = 0) -> ToolCall:
    return ToolCall("view", {"path": path, "start": start, "end": end})


def search(text: str, path: str = "") -> ToolCall:
    return ToolCall("search", {"text": text, "path": path})


def replace_lines(path: str, start: int, end: int, text: str) -> ToolCall:
    return ToolCall("replace_lines", {"path": path, "start": start, "end": end, "text": text})


def edit(path: str, old: str, new: str) -> ToolCall:
    return ToolCall("edit", {"path": path, "old": old, "new": new})


def create(path: str, text: str) -> ToolCall:
    return ToolCall("create", {"path": path, "text": text})


def bash(command: str) -> ToolCall:
    return ToolCall("bash", {"command": command})


def run_tests() -> ToolCall:
    return ToolCall("test", {})


@pytest.fixture
def box(case_runner: CaseRunner) -> Iterator[t.WorkspaceTools]:
    workspace = Workspace(TASK.files, lambda: WorkerSandbox(SandboxSpec("bubblewrap")))
    yield t.WorkspaceTools(TASK, workspace, case_runner, LIMITS)
    workspace.close()


def test_view(box: t.WorkspaceTools) -> None:
    whole = box.run(view("solution.py"))
    lines = ((1, "def affine(x):"), (2, "    t = x * 2"), (3, "    return t + 4"))
    assert whole == t.Listing(tuple(("solution.py", n, text) for n, text in lines))
    part = box.run(view("solution.py", 2, 2))
    assert part == t.Listing((("solution.py", 2, "    t = x * 2"),))
    for call in (
        view("solution.py", 0, 2),
        view("solution.py", 3, 2),
        view("solution.py", 1, 9),
    ):
        result = box.run(call)
        assert isinstance(result, t.Refused)
        assert result.kind == "lines"


@pytest.mark.parametrize("path", ["gone.py", "../etc/passwd", "/etc/passwd", "tests", "", "a\0b"])
def test_unusable_paths_are_refused(box: t.WorkspaceTools, path: str) -> None:
    for call in (
        view(path),
        replace_lines(path, 1, 1, "x"),
        edit(path, "a", "b"),
    ):
        result = box.run(call)
        assert isinstance(result, t.Refused)
        assert result.kind == "path"
    assert box.workspace.snapshot() == TASK.files


def test_a_view_of_an_empty_file_finds_nothing(box: t.WorkspaceTools) -> None:
    box.workspace.write("empty", b"")
    for call in (view("empty"), view("empty", 1, 5)):
        assert box.run(call) == t.Listing(())


def test_search_is_plain_text_and_capped(box: t.WorkspaceTools) -> None:
    assert box.run(search("x * 2")) == t.Listing((("solution.py", 2, "    t = x * 2"),))
    assert box.run(search("(a+)+$")) == t.Listing(())
    assert isinstance(box.run(search("")), t.Refused)
    many = box.run(search("e"))
    assert isinstance(many, t.Listing)
    assert len(many.lines) == 5
    assert many.num_left_out > 0
    only = box.run(search("affine", "tests/"))
    assert isinstance(only, t.Listing)
    assert {path for path, _, _ in only.lines} == {"tests/test_visible.py"}


def test_search_and_view_count_lines_alike(box: t.WorkspaceTools) -> None:
    """Form feeds separate sections of old Python files, and end no line."""
    box.workspace.write("f", "a\n\x0cb\u2028\x85\nc = 1\r\nd\n".encode())
    viewed = box.run(view("f"))
    assert isinstance(viewed, t.Listing)
    assert [text for _, _, text in viewed.lines] == ["a", "\x0cb\u2028\x85", "c = 1\r", "d"]
    for text, number in (("b", 2), ("c = ", 3), ("d", 4)):
        found = box.run(search(text, "f"))
        assert isinstance(found, t.Listing)
        assert found.lines == (viewed.lines[number - 1],)


def test_replace_lines_keeps_the_rest_to_the_byte(box: t.WorkspaceTools) -> None:
    data = b"one\r\ntwo\xff\r\nthree"
    box.workspace.write("f", data)
    assert box.run(replace_lines("f", 1, 1, "ONE")) == t.Done()
    assert box.workspace.read("f") == b"ONE\ntwo\xff\r\nthree"
    assert box.run(replace_lines("f", 2, 3, "end")) == t.Done()
    assert box.workspace.read("f") == b"ONE\nend"
    assert box.run(replace_lines("f", 1, 1, "")) == t.Done()
    assert box.workspace.read("f") == b"end"
    for start, end in ((0, 1), (2, 1), (1, 2), (-1, 1)):
        assert isinstance(box.run(replace_lines("f", start, end, "x")), t.Refused)
    assert box.workspace.read("f") == b"end"


def test_edit_wants_exactly_one_place(box: t.WorkspaceTools) -> None:
    assert box.run(edit("solution.py", "x * 2", "x * 3")) == t.Done()
    assert b"x * 3" in box.workspace.read("solution.py")
    for old in ("t", "absent", ""):
        assert isinstance(box.run(edit("solution.py", old, "y")), t.Refused)


def test_create_never_overwrites(box: t.WorkspaceTools) -> None:
    assert box.run(create("new/file.py", "x = 1\n")) == t.Done()
    assert box.workspace.read("new/file.py") == b"x = 1\n"
    for path in ("solution.py", "solution.py/below", "new", "../x"):
        assert isinstance(box.run(create(path, "x")), t.Refused)
    assert box.workspace.read("solution.py") == BROKEN


def test_a_test_file_rewritten_into_another_form_is_a_refusal(box: t.WorkspaceTools) -> None:
    assert isinstance(box.run(run_tests()), SuiteReport)
    box.workspace.write("tests/test_visible.py", b"def test_0():\n    pass\n")
    assert isinstance(box.run(run_tests()), t.Refused)


def test_a_shell_works_on_the_same_tree(box: t.WorkspaceTools) -> None:
    box.run(edit("solution.py", "x * 2", "x * 5"))
    result = box.run(bash("grep -c 'x \\* 5' solution.py; sed -i s/5/3/ solution.py; ls tests"))
    assert isinstance(result, ExecResult)
    assert result.output == b"1\ntest_visible.py\n"
    assert b"x * 3" in box.workspace.read("solution.py")
    report = box.run(run_tests())
    assert isinstance(report, SuiteReport)
    assert report.passed
    assert set(box.workspace.snapshot()) == set(TASK.files)
    late = box.run(bash("sleep 60"))
    assert isinstance(late, ExecResult)
    assert late.timed_out
    assert isinstance(box.run(bash("a\0b")), t.Refused)


def test_without_a_sandbox_there_is_no_shell(case_runner: CaseRunner) -> None:
    box = t.WorkspaceTools(TASK, Workspace(TASK.files), case_runner)
    assert isinstance(box.run(bash("ls")), t.Refused)


def test_submit_and_invalid(box: t.WorkspaceTools) -> None:
    assert box.run(ToolCall("submit", {})) == t.Submitted()
    assert box.run(CallError("", "what?")) == t.Refused("what?")


def test_a_file_has_a_largest_size() -> None:
    workspace = Workspace({})
    with pytest.raises(WorkspaceError, match="too large"):
        workspace.write("big", bytes((4 << 20) + 1))


HALF = "\ud800"  # half a surrogate pair: JSON can spell it, UTF-8 cannot


@pytest.mark.parametrize(
    "call",
    [
        view(HALF),
        replace_lines("solution.py", 1, 1, HALF),
        edit("solution.py", HALF, "x"),
        edit("solution.py", "x * 2", HALF),
        create("new.py", HALF),
        create(HALF, "x"),
        bash(f"echo {HALF}"),
    ],
)
def test_text_that_no_file_can_hold_is_refused(box: t.WorkspaceTools, call: ToolCall) -> None:
    assert isinstance(box.run(call), t.Refused)
    assert box.workspace.snapshot() == TASK.files


def test_trees_have_a_largest_size(box: t.WorkspaceTools) -> None:
    for number in range(7):
        assert box.run(create(f"big{number}", "x" * (4 << 20))) == t.Done()
    assert isinstance(box.run(create("big8", "x" * (4 << 20))), t.Refused)
    many = Workspace({f"f{i}": b"" for i in range(4000)})
    with pytest.raises(WorkspaceError, match="too many"):
        many.write("one more", b"")
    many.write("f0", b"replacing is fine")


@pytest.mark.parametrize(
    "text",
    ["(" * 5000, "assert " + "-" * 5000 + "1", "x" * (300 << 10), "assert f(1) == " + "[" * 150],
)
def test_a_monstrous_test_file_is_a_refusal(box: t.WorkspaceTools, text: str) -> None:
    box.workspace.write("tests/test_visible.py", f"def test_0():\n    {text}\n".encode())
    assert isinstance(box.run(run_tests()), t.Refused)


def test_a_work_folder_that_the_agent_filled_is_its_own_trouble(box: t.WorkspaceTools) -> None:
    box.run(bash("for i in 1 2 3 4 5; do fallocate -l 15M f$i; done; cat /dev/zero > rest"))
    result = box.run(create("new.py", "x" * 10_000))
    assert isinstance(result, t.Refused)
