"""Canonical JSON: one spelling per value, and a parser that takes nothing else for granted."""

import json
import math
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts import ArtifactError, canonical_json, parse_json
from tests.artifacts.json_values import scalars, texts, values


@pytest.mark.parametrize(
    ("value", "spelling"),
    [
        ({"b": 1, "a": [1, 2], "": None}, '{"":null,"a":[1,2],"b":1}'),
        ({"\U0001f600": 1, "\ue000": 2}, '{"\ue000":2,"\U0001f600":1}'),
        ('"\\/\b\t\n\f\r\x00\x1f\x7f\u2028é', '"\\"\\\\/\\b\\t\\n\\f\\r\\u0000\\u001f\x7f\u2028é"'),
        ([1, 1.0, -0.0, 0, 1e22, 1e-5, 1e16, 0.1], "[1,1.0,-0.0,0,1e+22,1e-05,1e+16,0.1]"),
        (123456789012345678901234567890, "123456789012345678901234567890"),
        ((True, False, (1,)), "[true,false,[1]]"),
        ({1: 0}, '{"1":0}'),
        ({None: 0}, '{"null":0}'),
        ({2.5: 0}, '{"2.5":0}'),
    ],
)
def test_each_value_has_its_documented_spelling(value, spelling):
    assert canonical_json(value) == spelling.encode()


@given(values)
def test_what_is_spelled_is_read_back_and_spelled_the_same(value):
    data = canonical_json(value)
    parsed = parse_json(data, what="value")
    assert repr(parsed) == repr(json.loads(data))  # repr tells 1 from 1.0 and 0.0 from -0.0
    assert canonical_json(parsed) == data


@given(st.dictionaries(texts, scalars))
def test_the_order_of_insertion_does_not_show(value):
    assert canonical_json(value) == canonical_json(dict(reversed(value.items())))


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        -math.inf,
        {math.nan: 1},
        {1, 2},
        b"bytes",
        pathlib.Path("p"),
        print,
        object(),
        "\ud800",
        {"\udfff": 1},
        {1: "a", "1": "b"},
        [10**5000],
    ],
)
def test_what_is_not_json_is_a_type_error(value):
    with pytest.raises(TypeError, match="no canonical JSON"):
        canonical_json([value])


def test_a_value_that_contains_itself_is_a_type_error():
    cycle: list[object] = []
    cycle.append(cycle)
    with pytest.raises(TypeError, match="no canonical JSON"):
        canonical_json(cycle)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'\xef\xbb\xbf{"a":1}', "BOM"),
        (b'{"a":"\xff"}', "utf-8"),
        (b'"\xed\xa0\x80"', "utf-8"),
        ('{"a":1}'.encode("utf-16"), "utf-8"),
        (b'{"a":1,"b":2,"a":1}', "'a' occurs twice"),
        (b'[{"x":{"k":1,"k":1}}]', "'k' occurs twice"),
        (rb'{"a":1,"\u0061":2}', "'a' occurs twice"),
        (b"NaN", "NaN"),
        (b'{"a":[Infinity]}', "Infinity"),
        (b"-Infinity", "Infinity"),
        (b"1e999", "too large"),
        (b"-1e999", "too large"),
        (b"1" * 5000, "digits"),
        (rb'"\ud800"', "surrogates"),
        (rb'{"\uDfff":1}', "surrogates"),
        (b"[" * 100_000, "recursion"),
        (b"", "Expecting value"),
        (b"{} {}", "Extra data"),
        (b"[1,]", "not strict JSON"),
    ],
)
def test_what_is_not_strict_json_is_refused_with_its_reason(data, reason):
    with pytest.raises(ArtifactError, match=reason) as caught:
        parse_json(data, what="the settings")
    assert caught.value.code == "json"
    assert str(caught.value).startswith("the settings is not strict JSON")


def test_a_pair_of_surrogate_escapes_is_one_character():
    assert parse_json(rb'"\ud83d\ude00"', what="value") == "\U0001f600"
