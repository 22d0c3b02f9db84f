"""One id per byte of the vocabulary, in its order."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts import TokenizerSpec
from riftco.errors import TokenizerError
from riftco.tokenizer.byte_codec import ByteCodec, distinct_bytes
from tests.support import fixture

byte_cases = pytest.mark.parametrize("case", fixture("tokenizer.json")["byte"], ids=range(3))


@byte_cases
def test_vocabulary_is_that_of_the_original(case: dict) -> None:
    assert list(distinct_bytes(base64.b64decode(case["corpus_base64"]))) == case["byte_vocabulary"]


@byte_cases
def test_ids_are_those_of_the_original(case: dict) -> None:
    codec = ByteCodec(TokenizerSpec("byte", byte_vocabulary=tuple(case["byte_vocabulary"])))
    assert codec.encode(base64.b64decode(case["encode"]["bytes_base64"])) == case["encode"]["ids"]


@given(data=st.data(), vocabulary=st.lists(st.integers(0, 255), min_size=1, unique=True))
def test_ids_are_places_in_the_vocabulary_whatever_its_order(
    data: st.DataObject, vocabulary: list[int]
) -> None:
    codec = ByteCodec(TokenizerSpec("byte", byte_vocabulary=tuple(vocabulary)))
    ids = data.draw(st.lists(st.integers(0, len(vocabulary) - 1)))
    assert codec.encode(bytes(vocabulary[token_id] for token_id in ids)) == ids
    assert b"".join(codec.pieces) == bytes(vocabulary)


def test_a_byte_outside_the_vocabulary_is_named_with_its_place() -> None:
    codec = ByteCodec(TokenizerSpec("byte", byte_vocabulary=(98, 97)))
    with pytest.raises(TokenizerError, match=r"byte 195 \(0xc3\) at offset 2 is not in .* 2 bytes"):
        codec.encode("abé".encode())
