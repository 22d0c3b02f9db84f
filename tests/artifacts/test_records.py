"""References and step records: what is written is read back, and anything else is refused."""

import pytest

from artifacts import Ref, StepRecord, StoreError
from artifacts.records import decode_record, decode_ref, encode_record, encode_ref

ONE, TWO = Ref("bundle", "a" * 64, "file:///one"), Ref("metrics", "b" * 64)
RECORD = StepRecord("train", 3, {"rate": 0.5}, {"z": TWO, "a": ONE}, 1.25)
SIZES = {ONE: 10, TWO: 20}


def uri(digest: str) -> str:
    return f"memory:{digest[:1]}"


def test_a_reference_is_its_kind_and_digest_wherever_it_lies():
    assert Ref("bundle", "a" * 64, "file:///elsewhere") == ONE
    assert hash(Ref("bundle", "a" * 64)) == hash(ONE)
    assert Ref("metrics", "a" * 64) != ONE


@pytest.mark.parametrize("digest", ["", "a" * 63, "A" * 64, "g" * 64, "../" + "a" * 61, None])
def test_a_reference_needs_a_digest(digest):
    with pytest.raises(ValueError, match="digest"):
        Ref("bundle", digest)


@pytest.mark.parametrize("kind", ["", ".hidden", "a/b", "a b", "..", "x" * 129, 5, "a\n"])
def test_a_kind_must_be_a_plain_name(kind):
    with pytest.raises(StoreError, match="kind") as caught:
        Ref(kind, "a" * 64)
    assert caught.value.code == "bad-name"


def test_a_record_holds_digests_and_sizes_in_order_and_no_location():
    data = encode_record("f" * 64, RECORD, SIZES.__getitem__)
    assert b"file:" not in data
    assert b'{"digest":"%s","kind":"metrics","name":"z","size":20}' % (b"b" * 64) in data
    key, record = decode_record(data, uri)
    assert (key, record) == ("f" * 64, RECORD)
    assert list(record.results) == ["z", "a"]
    assert record.results["a"].uri == "memory:a"


def test_a_reference_is_read_back():
    assert decode_ref(encode_ref(ONE, 10), uri) == ONE


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b'{"kind":"x","digest":"short"}', b"\xff"])
def test_other_bytes_are_refused(data):
    with pytest.raises((ValueError, TypeError, KeyError)):
        decode_record(data, uri)
    with pytest.raises((ValueError, TypeError, KeyError)):
        decode_ref(data, uri)


def test_a_result_name_must_be_a_plain_name():
    with pytest.raises(StoreError, match="result name"):
        encode_record("f" * 64, StepRecord("s", 1, {}, {"a/b": ONE}, 0.0), SIZES.__getitem__)
