"""The tiny policy's words: what they do and what comes back, to the letter."""

from __future__ import annotations

import re

import pytest
from affine_repo import affine_task
from hypothesis import given
from hypothesis import strategies as st

from envs.actions.grammars.compact import find_body, tidy
from envs.grading.case_runner import CaseRunner
from envs.swe import SweEnv
from envs.tasks.repair import take


def test_an_episode_to_the_letter(case_runner: CaseRunner) -> None:
    env = SweEnv(affine_task(), case_runner)
    assert env.reset().text == "fix affine : x times 3 plus 4"
    said: list[str] = []
    for action in (
        "view",
        "test",
        "replace 1 t = x * 3",
        "view",
        "test",
        "replace 3 return t",
        "replace 0 return t",
        "submit",
    ):
        observation = env.step(action)
        assert not observation.malformed
        said.append(observation.text)
    assert said == [
        "1 t = x * 2\n2 return t + 4",
        "fail affine(1) got 6 want 7",
        "ok",
        "1 t = x * 3\n2 return t + 4",
        "pass",
        "bad line",
        "bad line",
        "",
    ]
    assert (observation.done, observation.stop_reason) == (True, "submit")
    assert env.grade().reward == 1.0


@pytest.mark.parametrize(
    "action",
    ["", "  ", "look", "view 3", "replace", "replace 1", "replace x y", "replace -1 x", "testing",
     "submit now", "VIEW", "replace 99999999 x = 1", "replace 1 ", "view\ntest", "\0", "é" * 5000],
)  # fmt: skip
def test_anything_else_is_a_bad_tool(case_runner: CaseRunner, action: str) -> None:
    env = SweEnv(affine_task(), case_runner)
    env.reset()
    observation = env.step(action)
    assert (observation.text, observation.malformed, observation.done) == ("bad tool", True, False)
    assert env.patch() == b""


@pytest.mark.parametrize(
    ("line", "reply"),
    [
        ("t = y * 3", "error NameError"),
        ("t = x *", "error SyntaxError"),
        ("t = x / 0", "error ZeroDivisionError"),
        ("while True : pass", "error timeout"),
        ("import os ; os . _exit ( 0 )", "error crash"),
        ("t = [ 1 ] * 10 ** 10", "error MemoryError"),
        ("return affine ( x )", "error RecursionError"),
        ("return affine", "fail affine(1) got function want 7"),
        ("return x * 3.0", "fail affine(1) got 3.0 want 7"),
        ("return True", "fail affine(1) got True want 7"),
        ("return [ x ] * 300", None),
    ],
)
def test_what_the_tests_say(case_runner: CaseRunner, line: str, reply: str | None) -> None:
    env = SweEnv(affine_task(), case_runner)
    env.reset()
    assert env.step(f"replace 1 {line}").text == "ok"
    text = env.step("test").text
    if reply is None:
        assert text.startswith("fail affine(1) got [1, 1, ")
        assert len(text) < 220
        assert text.endswith(" ...")
    else:
        assert text == reply
    env.step("submit")
    assert env.grade().reward == 0.0


@pytest.mark.parametrize(
    ("spoken", "written"),
    [
        ("t . append ( v + 3 )", "t.append(v + 3)"),
        ("return t [ : 3 ]", "return t[:3]"),
        ("t += v * - 2", "t += v * -2"),
        ("x = 0 - x", "x = 0 - x"),
        ("if x < 3 :", "if x < 3:"),
        ("elif x > 3 :", "elif x > 3:"),
        ("else :", "else:"),
        ("else:", "else:"),
        ("for v in xs :", "for v in xs:"),
        ("while x % 2 == 0 :", "while x % 2 == 0:"),
        ("try :", "try:"),
        ("except ValueError :", "except ValueError:"),
        ("with open ( x ) as f :", "with open(x) as f:"),
        ("return", "return"),
        ("break", "break"),
        ("return ( x , 1 )", "return (x, 1)"),
        ("return { 1 : 2 }", "return {1: 2}"),
        ("for v in xs", "for v in xs"),  # not Python: as it is
        ("x = = 1", "x = = 1"),
        ("a = 1 ; b = 2", "a = 1 ; b = 2"),  # two statements: as they are
        ("if x : return 1", "if x : return 1"),
        ("else : pass", "else : pass"),
        ("( " * 300 + ") " * 300, None),
        ("9" * 450, "9" * 450),
        ("x = '''a", "x = '''a"),
        ("'a\\nb'", "'a\\nb'"),
    ],
)
def test_code_is_written_as_python_is_or_left_alone(spoken: str, written: str | None) -> None:
    assert tidy(spoken) == (spoken if written is None else written)


@given(st.text(max_size=60) | st.text(alphabet="()[]{}:=+-*%,.<> \n\t'\"x1#\\", max_size=60))
def test_one_line_stays_one_line(code: str) -> None:
    code = code.replace("\n", " ")
    assert "\n" not in tidy(code)


def test_every_line_of_every_repair_task_keeps_its_meaning() -> None:
    """What the demonstrations write is what the file then holds."""
    for task in take(3, "train", 200):
        for line in (*task.fixed, *task.broken):
            spoken = " ".join(tokens(line.strip()))
            assert tidy(spoken) == line.strip()


def tokens(line: str) -> list[str]:
    return re.findall(r"\d+|\w+|[+\-*/%<>=!]=|//|[^\w\s]", line)


def test_the_indentation_is_kept(case_runner: CaseRunner) -> None:
    loop = b"    for i in range(3):\n\n        x = i\n    return x\n"
    source = b"import math\n\ndef affine(x):\n" + loop + b"\nY = 1\n"
    task = affine_task(files={"solution.py": source, "tests/test_visible.py": b""})
    env = SweEnv(task, case_runner)
    env.reset()
    assert env.step("view").text == "1 for i in range(3):\n2 \n3 x = i\n4 return x"
    assert env.step("replace 3 x += i").text == "ok"
    assert b"+        x += i\n" in env.patch()
    assert env.step("replace 5 Y = 2").text == "bad line"


def test_a_file_without_a_function_is_all_body() -> None:
    body = find_body("a = 1\nb = 2\n\n")
    assert (body.first, body.last) == (1, 2)


def test_a_missing_file_is_a_bad_tool(case_runner: CaseRunner) -> None:
    env = SweEnv(affine_task(focus_path="gone.py"), case_runner)
    env.reset()
    assert env.step("view") == env.step("replace 1 x")
    assert env.step("view").text == "bad tool"


def test_bytes_that_are_not_utf8_stay(case_runner: CaseRunner) -> None:
    source = b"def affine(x):\n    t = x  # caf\xe9\n    return t\n"
    task = affine_task(files={"solution.py": source, "tests/test_visible.py": b""})
    env = SweEnv(task, case_runner)
    env.reset()
    env.step("replace 2 return 0")
    assert b"\n     t = x  # caf\xe9\n-    return t\n+    return 0\n" in env.patch()
