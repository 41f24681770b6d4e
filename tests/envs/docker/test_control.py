"""Tests turned wrong fail for honest code, whatever form their expectations have."""

from __future__ import annotations

import random
import textwrap

import pytest

from envs.grading.control import draw_choice, function_of, turn_wrong

EXPECTATIONS = {
    "equal to an integer": "assert f(3) == 9",
    "literal on the left": "assert 9 == f(3)",
    "negative number": "assert -f(3) == -9",
    "text": "assert str(f(3)) == '9'",
    "empty text": "assert '' == str(f(3))[1:]",
    "bytes": "assert bytes([f(3)]) == b'\\t'",
    "boolean": "assert (f(3) > 1) == True",
    "list": "assert [f(1), f(3)] == [1, 9]",
    "empty list": "assert [f(1)][1:] == []",
    "dictionary": "assert {'a': f(3)} == {'a': 9}",
    "none": "assert (f(3) and None) == None",
    "variable": "want = 9\n    assert f(3) == want",
    "truth": "assert f(3)",
    "not": "assert not f(0)",
    "is": "assert (f(3) and None) is None",
    "in": "assert 9 in [f(3)]",
    "less": "assert f(3) < 10",
    "both": "assert f(3) == 9 and f(2) == 4",
    "message": "assert f(3) == 9, 'nine'",
    "in a loop": "for x in (1, 2):\n        assert f(x) == x * x",
    "raises": "try:\n        f('a')\n    except TypeError:\n        pass",
    "no expectation": "f(3)",
    "with a docstring": "'''Nine.'''\n    f(3)",
}


def run(source: bytes) -> dict[str, bool]:
    """Whether each test function passes."""
    namespace: dict[str, object] = {"f": lambda x: x * x}
    exec(source, namespace)
    passed: dict[str, bool] = {}
    for name, function in list(namespace.items()):
        if name.startswith("test") and callable(function):
            try:
                function()
            except Exception:
                passed[name] = False
            else:
                passed[name] = True
    return passed


@pytest.mark.parametrize("form", EXPECTATIONS)
@pytest.mark.parametrize("seed", range(3))
def test_every_form_is_turned(form: str, seed: int) -> None:
    source = f"def test_it():\n    {EXPECTATIONS[form]}\n".encode()
    assert run(source) == {"test_it": True}
    wrong = turn_wrong(source, random.Random(seed))
    assert wrong.turned == {"test_it"}
    assert run(wrong.source) == {"test_it": False}


def test_literals_keep_their_type() -> None:
    wrong = turn_wrong(b"def test_a():\n    assert f(3) == 9\n", random.Random(0)).source
    assert int(wrong.split(b"==")[1]) != 9


def test_methods_of_unittest() -> None:
    source = textwrap.dedent(
        """
        import unittest


        class CaseTest(unittest.TestCase):
            def test_equal(self):
                self.assertEqual(3 * 3, 9)

            def test_true(self):
                self.assertTrue(3 > 1)

            def test_raises(self):
                with self.assertRaises(TypeError):
                    len(3)

            def helper(self):
                self.assertEqual(1, 2)
        """
    ).encode()
    wrong = turn_wrong(source, random.Random(0))
    assert wrong.turned == {"CaseTest.test_equal", "CaseTest.test_true", "CaseTest.test_raises"}
    namespace: dict[str, object] = {}
    exec(wrong.source, namespace)
    case = namespace["CaseTest"]
    for name in ("test_equal", "test_true", "test_raises"):
        with pytest.raises(AssertionError):
            getattr(case(name), name)()  # pyright: ignore[reportCallIssue]


def test_what_is_not_python_stays() -> None:
    assert turn_wrong(b"def (", random.Random(0)).source == b"def ("
    assert turn_wrong(b"x = 1\n", random.Random(0)).turned == frozenset()


def test_only_the_chosen_tests_are_turned() -> None:
    source = b"def test_a():\n    assert f(3) == 9\n\n\ndef test_b():\n    assert f(2) == 4\n"
    wrong = turn_wrong(source, random.Random(0), lambda name: name == "test_b")
    assert run(wrong.source) == {"test_a": True, "test_b": False}


def test_a_choice_is_the_same_for_a_name_and_always_has_what_it_must() -> None:
    names = [f"test_{i}" for i in range(200)]
    sizes: set[int] = set()
    for seed in range(40):
        choose = draw_choice(random.Random(seed), always=["test_7"])
        picked = [name for name in names if choose(name)]
        assert picked == [name for name in names if choose(name)]
        assert "test_7" in picked
        sizes.add(len(picked))
    assert 1 in sizes, "a control run that differs from a real one by what must be forged alone"
    assert 200 in sizes


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("a/t.py::test_x[1-a::b]", "test_x"),
        ("t.py::C::test_x", "C.test_x"),
        ("C.test_x[p]", "C.test_x"),
        ("test_x", "test_x"),
    ],
)
def test_function_names(name: str, function: str) -> None:
    assert function_of(name) == function
