"""Kinds of fields: what they take, what they say of what they do not, and that their schemas agree with them."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tegrad.serve.failures import Failure
from tegrad.serve.fields import (
    Absent,
    Anything,
    Dictionary,
    Either,
    Field,
    Flag,
    Kind,
    Listed,
    Number,
    Object,
    Tagged,
    Text,
    parsed,
)

NUMBERS = Listed(Number(0, 9, whole=True), least=1, most=3)
KINDS: list[Kind] = [
    Text(),
    Text(("low", "high")),
    Text(most=3),
    Number(0, 1),
    Number(-2, 5, whole=True),
    Number(-2, 5, whole=True, near=True),
    Flag(),
    Absent("leave it out"),
    NUMBERS,
    Either((Text(), NUMBERS)),
    Dictionary(Flag(), most=2),
    Object({"a": Field(Flag(), required=True), "b": Field(Number(0, 1), 0.5)}),
    Tagged("kind", {"one": Object({"a": Field(Text(), required=True)}), "two": Object({})}, default="two"),
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 11) | st.floats(-1, 2) | st.sampled_from(["low", "one", "two", "long"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["a", "b", "kind", "c"]), inner, max_size=3)
    ),
    max_leaves=5,
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind)[:40])
@settings(max_examples=80, derandomize=True, database=None, deadline=None)
@given(value=JSON)
def test_what_is_read_is_what_the_schema_says(kind: Kind, value: Any) -> None:
    if jsonschema_rs.is_valid(kind.schema(), value):
        kind.read(value, "it")
        return
    with pytest.raises(Failure) as raised:
        kind.read(value, "it")
    place = str(raised.value.param)
    assert (raised.value.status, place[:2]) == (400, "it")
    assert str(raised.value).startswith(place)


def test_an_object_has_all_of_its_fields_and_no_others() -> None:
    kind = Object({"a": Field(Flag(), True), "b": Field(Text()), "c": Field(Number(0, 9, whole=True), 4)})
    assert kind.read({"b": "x", "c": 5.0, "d": 1}) == {"a": True, "b": "x", "c": 5}
    assert kind.read({"a": None}) == {"a": True, "b": None, "c": 4}


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        (Text(), {}, "it is an object: give a text"),
        (Text(("a", "b")), "c" * 99, 'it is "' + "c" * 39 + '...: give "a" or "b"'),
        (Absent("leave it out"), "a", "it is given: leave it out"),
        (Number(0, 1), None, "it is null: give a number from 0 to 1"),
        (Number(0, 1), 10**400, "it is 1" + "0" * 39 + "...: give a number from 0 to 1"),
        (NUMBERS, [], "it is a list of 0: give a list of 1 or more, each a whole number from 0 to 9"),
        (NUMBERS, [1, 2, 3, 4], "it is a list of 4: give at most 3"),
        (NUMBERS, [1, "a"], 'it[1] is "a": give a whole number from 0 to 9'),
        (Object({"a": Field(Flag(), required=True)}), {}, "it.a is missing: give true or false"),
        (Dictionary(Flag()), {"x": 1}, "it.x is 1: give true or false"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(kind: Kind, value: Any, said: str) -> None:
    with pytest.raises(Failure) as raised:
        kind.read(value, "it")
    assert str(raised.value) == said


def test_halves_of_characters_are_replaced() -> None:
    assert parsed(b'{"\\ud800": ["a\\udfffb", "\\ud83d\\ude00"]}') == {"\ufffd": ["a\ufffdb", "\U0001f600"]}
    assert Anything().read(parsed(b"[1e999]"), "it") == [float("inf")]
