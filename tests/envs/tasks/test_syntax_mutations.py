"""Bugs by syntax-tree edits: every kind, and what must never be touched."""

from __future__ import annotations

import ast
import bisect
import textwrap
from pathlib import Path

import pytest

from envs.errors import TaskError
from envs.tasks.syntax_mutations import KINDS, apply_site, find_sites

EXAMPLES: dict[str, tuple[str, str]] = {
    "comparison": ("return a not in b", "return a in b"),
    "arithmetic": ("return (a) + (b)", "return (a) - (b)"),
    "augmented": ("a += b", "a -= b"),
    "boolean": ("return a and b", "return a or b"),
    "negation": ("return not a", "return (a)"),
    "condition": ("if a > b: b = a", "if not (a > b): b = a"),
    "ternary": ("return a if b else 1", "return (1) if b else (a)"),
    "integer": ("return a + 10", "return a + 11"),
    "truth": ("return True", "return False"),
    "text": ("return 'abc'", "return 'ab'"),
    "index": ("return a[0]", "return a[-1]"),
    "slice": ("return a[1:b]", "return a[:b]"),
    "range": ("return range(1, a)", "return range(1, a - 1)"),
    "sibling_call": ("return a.lstrip(b)", "return a.rstrip(b)"),
    "swapped_arguments": ("return divmod(a, b)", "return divmod(b, a)"),
    "dropped_keyword": ("return sorted(a, key=b)", "return sorted(a)"),
    "wrong_name": ("return a", "return b"),
    "returned_value": ("return a + b", "return None"),
    "dropped_guard": ("if a: return b", "pass"),
    "dropped_statement": ("a.append(b)", "pass"),
    "dropped_else": ("if a: b = 1\n    else: b = 2", "if a: b = 1\n    else: pass"),
    "loop_control": ("for x in a: break", "for x in a: continue"),
    "exception_type": ("raise KeyError(a)", "raise IndexError(a)"),
}


def function(body: str) -> bytes:
    return f"def f(a, b):\n    {body}\n".encode()


def test_every_kind_has_an_example() -> None:
    assert set(EXAMPLES) | {"default_value"} == set(KINDS)


@pytest.mark.parametrize("kind", sorted(EXAMPLES))
def test_each_kind_does_what_its_name_says(kind: str) -> None:
    correct, broken = EXAMPLES[kind]
    content = function(correct)
    results = [apply_site(content, site) for site in find_sites(content, (kind,))]
    assert function(broken) in results


def test_defaults_are_spoiled_in_signatures() -> None:
    content = b"def f(a, b=2, *, c='x'):\n    return a\n"
    results = {apply_site(content, site) for site in find_sites(content, ("default_value",))}
    assert results == {
        b"def f(a, b=None, *, c='x'):\n    return a\n",
        b"def f(a, b=2, *, c=None):\n    return a\n",
    }


UNTOUCHED = b'''"""Module of 3 things."""
from typing import TYPE_CHECKING
LIMIT = 3 + 4
if TYPE_CHECKING:
    LIMIT = 5


class C:
    size = 7 - 1

    @decorated(1 + 2)
    def f(self, a: "list[int]", b: int | None = None) -> "x" | "y":
        """Doc of 9 words."""
        if TYPE_CHECKING:
            from x import y
        c: "Final" = a
        return c
'''


def test_only_behaviour_inside_functions_is_touched() -> None:
    sites = find_sites(UNTOUCHED)
    assert {site.function for site in sites} == {"C.f"}
    touched = {UNTOUCHED[site.edit.start : site.edit.end] for site in sites}
    assert touched <= {b"c", b"a"}, touched


def test_the_rest_of_the_file_stays_byte_for_byte() -> None:
    content = (
        b"# caf\xc3\xa9\r\ndef f(a):\r\n\x0c\r\n"
        b"    s = '\xc3\xa9\xc3\xa9' ; t = a + 1  # \xe2\x82\xac\r\n    return s, t\r\n"
    )
    (plus,) = find_sites(content, ("arithmetic",))
    assert apply_site(content, plus) == content.replace(b"a + 1", b"a - 1")
    assert (plus.line, plus.before, plus.after, plus.function) == (4, "+", "-", "f")


def test_operators_beside_comments_are_left_alone() -> None:
    content = b"def f(a, b):\n    return (a  # + or -\n            + b)\n"
    assert find_sites(content, ("arithmetic",)) == []


def test_string_formatting_is_no_arithmetic() -> None:
    assert find_sites(function("return '%s' % a"), ("arithmetic",)) == []


def test_an_edit_that_changes_nothing_is_refused() -> None:
    content = function("return max(a, a)")
    (swap,) = find_sites(content, ("swapped_arguments",))
    assert apply_site(content, swap) is None


@pytest.mark.parametrize("module", [bisect, textwrap])
def test_real_files_give_many_bugs_that_all_parse(module: object) -> None:
    content = Path(str(getattr(module, "__file__", ""))).read_bytes()
    sites = find_sites(content)
    assert len(sites) > 50
    sites = sites[:: max(1, len(sites) // 60)]  # checking one costs a parse
    results = [apply_site(content, site) for site in sites]
    made = [result for result in results if result is not None]
    assert len(made) > 0.9 * len(sites)
    for site, result in zip(sites, results, strict=True):
        if result is not None:
            ast.parse(result)
            assert content.startswith(result[: site.edit.start])


@pytest.mark.parametrize("content", [b"def f(:\n", b"x = '\xe9'\n", b"a\0b"])
def test_what_is_not_python_is_refused(content: bytes) -> None:
    with pytest.raises(TaskError, match="not Python in UTF-8"):
        find_sites(content)


def test_an_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(TaskError, match=r"got=\['nope'\] expected some of \['arithmetic'"):
        find_sites(b"", ("nope",))
