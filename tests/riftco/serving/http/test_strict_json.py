"""JSON that means one thing only."""

import json
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from riftco.serving.http.strict_json import parse_object

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=30)
@given(st.dictionaries(st.text(), VALUES, max_size=5), st.booleans())
def test_what_can_be_said_is_understood(value: dict, escaped: bool) -> None:
    assert parse_object(json.dumps(value, ensure_ascii=escaped).encode()) == value


@given(st.binary(max_size=60))
def test_bytes_are_an_object_or_a_value_error(data: bytes) -> None:
    with suppress(ValueError):
        assert isinstance(parse_object(data), dict)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"a":1,"a":1}', "has the key 'a' twice"),
        (b'{"b":{"\xc3\xa4":1,"\\u00e4":2}}', "has the key '\\\\xe4' twice"),
        (b'{"a":NaN}', "NaN is not JSON"),
        (b'{"a":[-Infinity]}', "-Infinity is not JSON"),
        (b'{"a":"\\ud800"}', "surrogates not allowed"),
        (b'{"a":["\\udc00\\ud800"]}', "surrogates not allowed"),
        (b'{"\\uD800":1}', "surrogates not allowed"),
        (b'{"a":' + b"9" * 5_000 + b"}", "Exceeds the limit"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
        (b'"a"', "must be an object"),
        ('{"a":1}'.encode("utf-16"), "can't decode"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_what_means_nothing_or_two_things_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_object(body)


def test_a_pair_of_surrogates_is_one_character() -> None:
    assert parse_object(b'{"a":"\\ud83d\\ude00"}') == {"a": "😀"}


@pytest.mark.parametrize("equal", [True, False])
def test_more_keys_than_any_request_has_are_refused(equal: bool) -> None:
    def body(count: int) -> bytes:
        pairs = ",".join(f'"{0 if equal else i}":0' for i in range(count))
        return f'{{"a":{{{pairs}}}}}'.encode()

    with pytest.raises(ValueError, match="an object of 50000 keys, more than 64"):
        parse_object(body(50_000))
    assert equal or len(parse_object(body(64))["a"]) == 64
