"""Reading case-form test files, judging answers, and reading answers that were tampered with."""

from __future__ import annotations

import json

import pytest
from affine_repo import FIXED, VISIBLE

from envs.errors import InfrastructureError, TaskError
from envs.grading.case_runner import (
    Answer,
    Answers,
    Case,
    CaseRunner,
    judge,
    parse_case_file,
    read_answers,
)
from envs.sandbox.guest.protocol import Reply
from envs.sandbox.launch import SandboxSpec
from envs.sandbox.limits import SandboxLimits
from envs.sandbox.pool import SandboxPool


def test_a_file_in_case_form() -> None:
    text = b'''"""What it is."""
from solution import keep as k
import math

def test_0():
    assert k([1, -2], x=True) == [3, (4.5, None)]

def test_b():
    "why"
'''
    with pytest.raises(TaskError, match="test_b"):
        parse_case_file("t.py", text)
    parsed = parse_case_file("t.py", text.split(b"def test_b")[0])
    assert parsed.imports == ("from solution import keep as k", "import math")
    assert parsed.cases == (Case("t.py::test_0", "k([1, -2], x=True)", [3, (4.5, None)]),)


@pytest.mark.parametrize(
    "text",
    [
        "def test_0():\n    assert f(1) is True\n",
        "def test_0():\n    assert f(1)\n",
        "def test_0():\n    assert f(1) == g(1)\n",
        "def test_0():\n    assert f(1) == 1 == 1\n",
        "def test_0():\n    assert 1 == f(1)\n",
        "def test_0():\n    assert f(1) != 1\n",
        "def test_0():\n    x = f(1)\n    assert x == 1\n",
        "def test_0(tmp_path):\n    assert f(1) == 1\n",
        "@mark\ndef test_0():\n    assert f(1) == 1\n",
        "async def test_0():\n    assert f(1) == 1\n",
        "class TestA:\n    pass\n",
        "def helper():\n    assert f(1) == 1\n",
        "X = 1\n",
        "def test_0():\n    assert f(1) == 1\ndef test_0():\n    assert f(1) == 2\n",
        "def test_0(:\n",
        "\0",
    ],
)
def test_other_forms_are_refused_by_name(text: str) -> None:
    with pytest.raises(TaskError, match=r"t\.py"):
        parse_case_file("t.py", text.encode())


CASES = (Case("t::a", "f(1)", 1), Case("t::a", "f(2)", 2), Case("t::b", "f(3)", 3))


def test_a_test_passes_when_all_its_assertions_do() -> None:
    report = judge(CASES, Answers((Answer(1), Answer(2), Answer(3))), "crash")
    assert dict(report.statuses) == {"t::a": "PASSED", "t::b": "PASSED"}
    assert report.passed
    report = judge(CASES, Answers((Answer(1), Answer(9), Answer(3))), "crash")
    assert dict(report.statuses) == {"t::a": "FAILED", "t::b": "PASSED"}
    assert report.failure is not None
    assert (report.failure.call, report.failure.got, report.failure.want) == ("f(2)", "9", "2")


def test_missing_answers_fail_for_the_reason_given() -> None:
    report = judge(CASES, Answers((Answer(1),)), "timeout")
    assert dict(report.statuses) == {"t::a": "FAILED", "t::b": "FAILED"}
    assert report.failure is not None
    assert (report.failure.kind, report.failure.call) == ("timeout", "f(2)")


def test_a_failed_import_is_an_error_of_every_test() -> None:
    report = judge(CASES, Answers(import_error="SyntaxError"), "crash")
    assert set(report.statuses.values()) == {"ERROR"}
    assert report.failure is not None
    assert report.failure.got == "SyntaxError"


def test_no_tests_is_not_a_pass() -> None:
    assert not judge((), Answers(), "crash").passed


def reply(output: bytes, total: int | None = None) -> Reply:
    return Reply(0, False, False, 0.0, len(output) if total is None else total, output, b"", b"")


GOOD = b'[0, "v", ["i", "1"]]\n'


@pytest.mark.parametrize(
    ("output", "count"),
    [
        (b"", 0),
        (GOOD, 1),
        (GOOD[:-1], 0),  # cut short
        (GOOD + b'[2, "v", ["i", "1"]]\n', 1),  # a gap
        (GOOD + GOOD, 1),  # the same call twice
        (b"hello\n" + GOOD, 0),
        (GOOD + b"\xff\xfe\n", 1),
        (GOOD + b'[1, "v", ["i", 1]]\n', 1),
        (GOOD + b'[1, "v"]\n', 1),
        (GOOD + b"7\n", 1),
        (GOOD + b"[" * 100_000 + b"\n", 1),
        (GOOD + b'[-1, "x", "NameError"]\n', 1),  # an import error after the fact
        (b'[true, "v", ["i", "1"]]\n', 0),
    ],
)
def test_only_clean_answers_in_order_are_read(output: bytes, count: int) -> None:
    assert len(read_answers(reply(output)).values) == count


def test_output_with_a_hole_answers_nothing() -> None:
    assert read_answers(reply(GOOD, total=10_000)) == Answers()


@pytest.mark.parametrize("name", ["not a name", "x" * 500, 7, None, "caf\xe9", ""])
def test_names_of_exceptions_are_made_harmless(name: object) -> None:
    answer = read_answers(reply(json.dumps([0, "x", name]).encode() + b"\n")).values[0]
    assert answer.raised.isascii()
    assert 1 <= len(answer.raised) <= 64


def test_equal_needs_the_same_type(case_runner: CaseRunner) -> None:
    tests = b"from solution import f\n\ndef test_0():\n    assert f(0) == 1\n"
    for body, status in ((b"1", "PASSED"), (b"True", "FAILED"), (b"1.0", "FAILED")):
        source = b"def f(x):\n    return " + body + b"\n"
        report = case_runner.run({"solution.py": source}, {"t.py": tests})
        assert report.statuses["t.py::test_0"] == status


def test_modules_and_data_of_the_tree_can_be_used(case_runner: CaseRunner) -> None:
    files = {
        "solution.py": b"from lib.deep import K\ndef f(x):\n    return [K, *open('data/x')]\n",
        "lib/__init__.py": b"",
        "lib/deep.py": b"K = 5\n",
        "data/x": b"hi",
    }
    tests = b"from solution import f\n\ndef test_0():\n    assert f(0) == [5, 'hi']\n"
    assert case_runner.run(files, {"tests/t.py": tests}).passed


def test_several_files_report_in_order(case_runner: CaseRunner) -> None:
    files = {"tests/b.py": VISIBLE, "tests/a.py": VISIBLE}
    report = case_runner.run({"solution.py": FIXED}, files)
    assert [name.split("::")[0] for name in report.statuses] == ["tests/b.py"] * 2 + [
        "tests/a.py"
    ] * 2
    assert report.passed


def test_runs_are_independent_and_repeatable(case_runner: CaseRunner) -> None:
    source = (
        b"SEEN = []\ndef f(x):\n    SEEN.append(x)\n    return [len(SEEN), str({'a', 'b', 'c'})]\n"
    )
    tests = b"from solution import f\n\ndef test_0():\n    assert f(0) == 0\n"
    gots: set[str] = set()
    for _ in range(4):
        failure = case_runner.run({"solution.py": source}, {"t.py": tests}).failure
        assert failure is not None
        gots.add(failure.got)
    assert len(gots) == 1
    assert gots.pop().startswith("[1, ")


def test_a_sandbox_too_small_for_the_tree_is_infrastructure() -> None:
    limits = SandboxLimits(tmp_bytes=64 << 10)
    pool = SandboxPool(SandboxSpec("bubblewrap", limits), num_workers=1)
    for _ in range(20):
        with pytest.raises(InfrastructureError, match="ENOSPC"):
            CaseRunner(pool).run({"solution.py": FIXED, "big": bytes(1 << 20)}, {"t.py": VISIBLE})
    assert pool.num_died == 0
    assert CaseRunner(pool).run({"solution.py": FIXED}, {"t.py": VISIBLE}).passed
    pool.close()
