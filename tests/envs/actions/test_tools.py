"""The tool box: typed calls, and refusals that change nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from affine_repo import BROKEN, affine_task

from envs.actions import tools as t
from envs.base import ExecResult
from envs.errors import WorkspaceError
from envs.grading.case_runner import CaseRunner
from envs.grading.suite import SuiteReport
from envs.sandbox.launch import SandboxSpec
from envs.sandbox.sandbox import WorkerSandbox
from envs.workspace import Workspace

TASK = affine_task()
LIMITS = t.ToolLimits(max_lines=5, bash_timeout_s=1.0, output_cap_bytes=1000)


@pytest.fixture
def box(case_runner: CaseRunner) -> Iterator[t.ToolBox]:
    workspace = Workspace(TASK.files, lambda: WorkerSandbox(SandboxSpec("bubblewrap")))
    yield t.ToolBox(TASK, workspace, case_runner, LIMITS)
    workspace.close()


def test_view(box: t.ToolBox) -> None:
    whole = box.run(t.View("solution.py"))
    lines = ((1, "def affine(x):"), (2, "    t = x * 2"), (3, "    return t + 4"))
    assert whole == t.Listing(tuple(("solution.py", n, text) for n, text in lines))
    part = box.run(t.View("solution.py", 2, 2))
    assert part == t.Listing((("solution.py", 2, "    t = x * 2"),))
    for call in (
        t.View("solution.py", 0, 2),
        t.View("solution.py", 3, 2),
        t.View("solution.py", 1, 9),
    ):
        result = box.run(call)
        assert isinstance(result, t.Refused)
        assert result.kind == "lines"


@pytest.mark.parametrize("path", ["gone.py", "../etc/passwd", "/etc/passwd", "tests", "", "a\0b"])
def test_unusable_paths_are_refused(box: t.ToolBox, path: str) -> None:
    for call in (
        t.View(path),
        t.ReplaceLines(path, 1, 1, "x"),
        t.Edit(path, "a", "b"),
    ):
        result = box.run(call)
        assert isinstance(result, t.Refused)
        assert result.kind == "path"
    assert box.workspace.snapshot() == TASK.files


def test_search_is_plain_text_and_capped(box: t.ToolBox) -> None:
    assert box.run(t.Search("x * 2")) == t.Listing((("solution.py", 2, "    t = x * 2"),))
    assert box.run(t.Search("(a+)+$")) == t.Listing(())
    assert isinstance(box.run(t.Search("")), t.Refused)
    many = box.run(t.Search("e"))
    assert isinstance(many, t.Listing)
    assert len(many.lines) == 5
    assert many.num_left_out > 0
    only = box.run(t.Search("affine", "tests/"))
    assert isinstance(only, t.Listing)
    assert {path for path, _, _ in only.lines} == {"tests/test_visible.py"}


def test_search_and_view_count_lines_alike(box: t.ToolBox) -> None:
    """Form feeds separate sections of old Python files, and end no line."""
    box.workspace.write("f", "a\n\x0cb\u2028\x85\nc = 1\r\nd\n".encode())
    viewed = box.run(t.View("f"))
    assert isinstance(viewed, t.Listing)
    assert [text for _, _, text in viewed.lines] == ["a", "\x0cb\u2028\x85", "c = 1\r", "d"]
    for text, number in (("b", 2), ("c = ", 3), ("d", 4)):
        found = box.run(t.Search(text, "f"))
        assert isinstance(found, t.Listing)
        assert found.lines == (viewed.lines[number - 1],)


def test_replace_lines_keeps_the_rest_to_the_byte(box: t.ToolBox) -> None:
    data = b"one\r\ntwo\xff\r\nthree"
    box.workspace.write("f", data)
    assert box.run(t.ReplaceLines("f", 1, 1, "ONE")) == t.Done()
    assert box.workspace.read("f") == b"ONE\ntwo\xff\r\nthree"
    assert box.run(t.ReplaceLines("f", 2, 3, "end")) == t.Done()
    assert box.workspace.read("f") == b"ONE\nend"
    assert box.run(t.ReplaceLines("f", 1, 1, "")) == t.Done()
    assert box.workspace.read("f") == b"end"
    for start, end in ((0, 1), (2, 1), (1, 2), (-1, 1)):
        assert isinstance(box.run(t.ReplaceLines("f", start, end, "x")), t.Refused)
    assert box.workspace.read("f") == b"end"


def test_edit_wants_exactly_one_place(box: t.ToolBox) -> None:
    assert box.run(t.Edit("solution.py", "x * 2", "x * 3")) == t.Done()
    assert b"x * 3" in box.workspace.read("solution.py")
    for old in ("t", "absent", ""):
        assert isinstance(box.run(t.Edit("solution.py", old, "y")), t.Refused)


def test_create_never_overwrites(box: t.ToolBox) -> None:
    assert box.run(t.Create("new/file.py", "x = 1\n")) == t.Done()
    assert box.workspace.read("new/file.py") == b"x = 1\n"
    for path in ("solution.py", "solution.py/below", "new", "../x"):
        assert isinstance(box.run(t.Create(path, "x")), t.Refused)
    assert box.workspace.read("solution.py") == BROKEN


def test_a_test_file_rewritten_into_another_form_is_a_refusal(box: t.ToolBox) -> None:
    assert isinstance(box.run(t.RunTests()), SuiteReport)
    box.workspace.write("tests/test_visible.py", b"def test_0():\n    pass\n")
    assert isinstance(box.run(t.RunTests()), t.Refused)


def test_a_shell_works_on_the_same_tree(box: t.ToolBox) -> None:
    box.run(t.Edit("solution.py", "x * 2", "x * 5"))
    result = box.run(t.Bash("grep -c 'x \\* 5' solution.py; sed -i s/5/3/ solution.py; ls tests"))
    assert isinstance(result, ExecResult)
    assert result.output == b"1\ntest_visible.py\n"
    assert b"x * 3" in box.workspace.read("solution.py")
    report = box.run(t.RunTests())
    assert isinstance(report, SuiteReport)
    assert report.passed
    assert set(box.workspace.snapshot()) == set(TASK.files)
    late = box.run(t.Bash("sleep 60"))
    assert isinstance(late, ExecResult)
    assert late.timed_out
    assert isinstance(box.run(t.Bash("a\0b")), t.Refused)


def test_without_a_sandbox_there_is_no_shell(case_runner: CaseRunner) -> None:
    box = t.ToolBox(TASK, Workspace(TASK.files), case_runner)
    assert isinstance(box.run(t.Bash("ls")), t.Refused)


def test_submit_and_invalid(box: t.ToolBox) -> None:
    assert box.run(t.Submit()) == t.Submitted()
    assert box.run(t.Invalid("what?")) == t.Refused("what?")


def test_a_file_has_a_largest_size() -> None:
    workspace = Workspace({})
    with pytest.raises(WorkspaceError, match="too large"):
        workspace.write("big", bytes((4 << 20) + 1))


HALF = "\ud800"  # half a surrogate pair: JSON can spell it, UTF-8 cannot


@pytest.mark.parametrize(
    "call",
    [
        t.View(HALF),
        t.ReplaceLines("solution.py", 1, 1, HALF),
        t.Edit("solution.py", HALF, "x"),
        t.Edit("solution.py", "x * 2", HALF),
        t.Create("new.py", HALF),
        t.Create(HALF, "x"),
        t.Bash(f"echo {HALF}"),
    ],
)
def test_text_that_no_file_can_hold_is_refused(box: t.ToolBox, call: t.ToolCall) -> None:
    assert isinstance(box.run(call), t.Refused)
    assert box.workspace.snapshot() == TASK.files


def test_trees_have_a_largest_size(box: t.ToolBox) -> None:
    for number in range(7):
        assert box.run(t.Create(f"big{number}", "x" * (4 << 20))) == t.Done()
    assert isinstance(box.run(t.Create("big8", "x" * (4 << 20))), t.Refused)
    many = Workspace({f"f{i}": b"" for i in range(4000)})
    with pytest.raises(WorkspaceError, match="too many"):
        many.write("one more", b"")
    many.write("f0", b"replacing is fine")


@pytest.mark.parametrize(
    "text",
    ["(" * 5000, "assert " + "-" * 5000 + "1", "x" * (300 << 10), "assert f(1) == " + "[" * 150],
)
def test_a_monstrous_test_file_is_a_refusal(box: t.ToolBox, text: str) -> None:
    box.workspace.write("tests/test_visible.py", f"def test_0():\n    {text}\n".encode())
    assert isinstance(box.run(t.RunTests()), t.Refused)


def test_a_work_folder_that_the_agent_filled_is_its_own_trouble(box: t.ToolBox) -> None:
    box.run(t.Bash("head -c 100M /dev/zero | split -b 8M"))
    result = box.run(t.Create("new.py", "x" * 10_000))
    assert isinstance(result, t.Refused)
