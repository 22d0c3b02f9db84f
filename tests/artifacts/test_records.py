"""References and step records: what is written is read back, and anything else is refused."""

from dataclasses import replace

import pytest

from artifacts import Ref, StepRecord, StoreError, step_key
from artifacts.records import (
    decode_record,
    decode_ref,
    decode_stage,
    encode_record,
    encode_ref,
    reference_objects,
    seal,
    unseal,
)

ONE, TWO = Ref("bundle", "a" * 64, "file:///one"), Ref("metrics", "b" * 64)
RECORD = StepRecord("train", 3, {"rate": 0.5}, {"z": TWO, "a": ONE}, 1.25)
KEY = step_key("train", 3, {"rate": 0.5})
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
    data = encode_record(KEY, RECORD, SIZES.__getitem__)
    assert b"file:" not in data
    assert b'{"digest":"%s","kind":"metrics","name":"z","size":20}' % (b"b" * 64) in data
    record = decode_record(KEY, data, uri)
    assert record == RECORD
    assert list(record.results) == ["z", "a"]
    assert record.results["a"].uri == "memory:a"


def test_a_reference_is_read_back():
    assert decode_ref(encode_ref(ONE, 10), uri) == ONE


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b'{"kind":"x","digest":"short"}', b"\xff"])
def test_other_bytes_are_refused(data):
    with pytest.raises((ValueError, TypeError, KeyError)):
        decode_record(KEY, data, uri)
    with pytest.raises((ValueError, TypeError, KeyError)):
        decode_ref(data, uri)


def test_a_result_name_must_be_a_plain_name():
    with pytest.raises(StoreError, match="result name"):
        encode_record("f" * 64, StepRecord("s", 1, {}, {"a/b": ONE}, 0.0), SIZES.__getitem__)


CONTENT = unseal(encode_record(KEY, RECORD, SIZES.__getitem__))
RESULT = CONTENT["results"][0]


@pytest.mark.parametrize(
    "changed",
    [
        {"key": "f" * 64},
        {"key": None},
        {"step": 5},
        {"step": "other"},
        {"version": True},
        {"version": 4},
        {"recipe": []},
        {"recipe": {"rate": 0.25}},
        {"recipe": {"input": {"kind": "no kind", "digest": "a" * 64}}},
        {"results": {}},
        {"results": [RESULT, RESULT]},
        {"results": [RESULT | {"size": -1}]},
        {"results": [RESULT | {"size": True}]},
        {"results": [RESULT | {"name": "a/b"}]},
        {"results": [RESULT | {"kind": "[bold]"}]},
        {"results": [RESULT | {"uri": "x"}]},
        {"results": ["x"]},
        {"seconds": "1"},
        {"seconds": -1},
        {"seconds": True},
        {"more": 1},
        {"previous": None},
    ],
)
def test_a_step_record_of_another_form_or_key_is_refused(changed):
    assert reference_objects(f"steps/{KEY}", seal(CONTENT)) == {"a" * 64: 10, "b" * 64: 20}
    with pytest.raises(StoreError, match=f"steps/{KEY}.*again") as caught:
        reference_objects(f"steps/{KEY}", seal(CONTENT | changed))
    assert caught.value.code == "damaged-reference"


@pytest.mark.parametrize("changed", [{"previous": 5}, {"previous": "x"}, {"more": 1}, {"key": "x"}])
def test_a_stage_of_another_form_is_refused(changed):
    stage = CONTENT | {"previous": "e" * 64}
    assert decode_stage(seal(stage), uri).previous == "e" * 64
    with pytest.raises(StoreError, match="not a reference of its kind"):
        decode_stage(seal(stage | changed), uri)


@pytest.mark.parametrize("folder", ["artifacts/" + "f" * 64, "tags/best", "runs/demo/train"])
def test_a_reference_of_another_folder_is_refused(folder):
    with pytest.raises(StoreError, match=folder) as caught:
        reference_objects(folder, seal(CONTENT))
    assert caught.value.code == "damaged-reference"


def test_what_would_not_be_read_is_not_written():
    with pytest.raises(ValueError, match="seconds"):
        encode_record(KEY, replace(RECORD, seconds=-1.0), SIZES.__getitem__)
