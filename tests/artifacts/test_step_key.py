"""Step keys: equal for the same recipe, different for any other, and refused where a value is not stable."""

import enum
import hashlib
import math
import pathlib

import numpy as np
import pytest
from hypothesis import given

from artifacts import step_key
from tests.artifacts.json_values import scalars, texts

RECIPE = {"config": {"steps": 10, "rate": 0.01, "names": ["a", "b"]}, "inputs": {"corpus": "0" * 64}}


def test_a_key_is_the_digest_of_the_documented_bytes():
    data = b'{"recipe":{"b":1,"rate":0.5},"step":"train","version":2}'
    assert step_key("train", 2, {"rate": 0.5, "b": 1}) == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize(
    "other",
    [
        ("tune", 1, RECIPE),
        ("train", 2, RECIPE),
        ("train", 1, RECIPE | {"extra": None}),
        ("train", 1, RECIPE | {"config": {"steps": 10.0, "rate": 0.01, "names": ["a", "b"]}}),
        ("train", 1, RECIPE | {"config": {"steps": 10, "rate": 0.01, "names": ["b", "a"]}}),
        ("train", 1, RECIPE | {"inputs": {"corpus": "1" * 64}}),
    ],
)
def test_every_part_of_a_recipe_changes_the_key(other):
    assert step_key(*other) != step_key("train", 1, RECIPE)


def test_the_order_of_fields_and_the_kind_of_sequence_do_not_change_the_key():
    again = {"inputs": RECIPE["inputs"], "config": {"names": ("a", "b"), "rate": 0.01, "steps": 10}}
    assert step_key("train", 1, again) == step_key("train", 1, RECIPE)


@given(texts, scalars, scalars)
def test_keys_are_equal_exactly_when_values_are_spelled_the_same(name, one, other):
    keys = [step_key("s", 1, {name: [value]}) for value in (one, other, one)]
    assert keys[0] == keys[2]
    assert (keys[0] == keys[1]) == (repr(one) == repr(other))


class Color(enum.StrEnum):
    RED = "red"


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        frozenset(),
        math.nan,
        -math.inf,
        pathlib.Path("/data"),
        print,
        lambda: 0,
        b"bytes",
        object(),
        {1: "a"},
        {None: "a"},
        {("a",): "b"},
        Color.RED,
        np.float64(0.5),
        np.arange(2),
        1j,
        "\ud800",
        range(3),
    ],
)
def test_a_value_without_a_stable_spelling_is_a_type_error(value):
    with pytest.raises(TypeError):
        step_key("s", 1, {"config": [value]})


def test_the_error_names_the_place():
    with pytest.raises(TypeError, match=r"recipe\.config\[1\]\.rate is nan"):
        step_key("s", 1, {"config": [0, {"rate": math.nan}]})
