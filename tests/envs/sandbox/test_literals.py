"""Values across the sandbox's border: exact types, nothing executable, nothing forged."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.sandbox.guest.literals import LiteralFormatError, Opaque, decode, encode, same

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(st.characters(), max_size=8)
    | st.binary(max_size=8)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(scalars, inner, max_size=4)
        | st.frozensets(scalars, max_size=4)
        | st.sets(scalars, max_size=4)
    ),
    max_leaves=12,
)


@given(values)
def test_literals_survive_the_wire(value: object) -> None:
    back = decode(json.loads(json.dumps(encode(value))))
    assert same(back, value)
    assert repr(type(back)) == repr(type(value))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (True, 1),
        (3, 3.0),
        ([1], [True]),
        ((1,), [1]),
        ({1: 2}, {1: 2.0}),
        ({1: 2}, {True: 2}),
        ({1}, {True}),
        ({1}, frozenset({1})),
        ("a", b"a"),
        (math.nan, math.nan),
        ([1, 2], [1]),
        (None, False),
        (Opaque("f"), Opaque("f")),
    ],
)
def test_what_is_not_the_same(left: object, right: object) -> None:
    assert not same(left, right)
    assert not same(right, left)


class Liar(int):
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 1

    def __repr__(self) -> str:
        return "7"


@pytest.mark.parametrize("value", [Liar(7), lambda: 7, object(), type, iter([7])])
def test_anything_else_is_opaque_and_equal_to_nothing(value: object) -> None:
    back = decode(encode(value))
    assert isinstance(back, Opaque)
    assert not same(back, 7)


def test_a_list_inside_itself_ends() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert "deep" in json.dumps(encode(endless))


@pytest.mark.parametrize(
    "forged",
    [
        None,
        7,
        "i",
        ["i"],
        ["i", 7, 7],
        ["i", 7],
        ["i", "zz"],
        ["b", 1],
        ["?", 1],
        ["S", [["l", []]]],
        ["d", [["i", "1"]]],
        ["d", 3],
        ["s", "ff"],
        ["f", "one"],
        {"i": 1},
    ],
)
def test_damaged_values_are_refused(forged: object) -> None:
    with pytest.raises(LiteralFormatError):
        decode(forged)


def test_huge_integers_do_not_hit_the_digit_limit() -> None:
    value = 10**5000
    assert same(decode(encode(value)), value)
