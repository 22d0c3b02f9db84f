"""Encoding must equal one replacement pass per rule, for learned and for hand-made rule lists alike."""

import base64
import time
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts import TokenizerSpec
from riftco.errors import TokenizerError
from riftco.tokenizer import bpe_codec
from riftco.tokenizer.bpe_codec import BpeCodec
from riftco.tokenizer.bpe_training import MergeRule, train_merge_rules
from tests.riftco.tokenizer import reference
from tests.support import SHARED_DATA, fixture, needs_shared_data

FIXTURE = fixture("tokenizer.json")
words = st.lists(st.sampled_from(b"abc"), max_size=40).map(bytes)


def _valid_rules(picks: list[tuple[int, int]]) -> tuple[MergeRule, ...]:
    """Any valid rules over three letters: useless, contradictory and colliding ones too."""
    ids = list(b"abc")
    rules: dict[tuple[int, int], MergeRule] = {}
    for left, right in picks:
        pair = ids[left % len(ids)], ids[right % len(ids)]
        if pair not in rules:
            rules[pair] = (*pair, 256 + len(rules))
            ids.append(rules[pair][2])
    return tuple(rules.values())


rule_lists = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=14).map(_valid_rules)


def codec_of(rules: tuple[MergeRule, ...]) -> BpeCodec:
    return BpeCodec(TokenizerSpec("bpe", merge_rules=rules))


@pytest.mark.parametrize("case", [*FIXTURE["bpe_training"], FIXTURE["rule_order"]], ids=range(9))
def test_ids_are_those_of_the_original(case: dict) -> None:
    codec = codec_of(tuple(tuple(rule) for rule in case["merge_rules"]))
    for encoding in case["encode"]:
        assert codec.encode(base64.b64decode(encoding["bytes_base64"])) == encoding["ids"]


@settings(max_examples=200)
@given(rules=rule_lists, data=words)
def test_ids_are_those_of_the_passes_for_any_rules(rules: tuple[MergeRule, ...], data: bytes) -> None:
    with mock.patch.object(bpe_codec, "_CHUNK_LENGTH", 3):
        assert codec_of(rules).encode(data) == reference.encode(data, rules)


@given(corpus=words, data=words)
def test_ids_are_those_of_the_passes_for_learned_rules(corpus: bytes, data: bytes) -> None:
    rules = train_merge_rules(corpus, 280, 1)
    with mock.patch.object(bpe_codec, "_CHUNK_LENGTH", 3):
        assert codec_of(rules).encode(data) == reference.encode(data, rules)


@given(corpus=st.one_of(words, st.binary()))
def test_learned_rules_spell_every_piece_once(corpus: bytes) -> None:
    pieces = codec_of(train_merge_rules(corpus, 400, 1)).pieces
    assert len(set(pieces)) == len(pieces)


@given(corpus=words.filter(len), copies=st.integers(2, 20))
def test_a_corpus_trained_to_the_end_encodes_to_the_last_id(corpus: bytes, copies: int) -> None:
    rules = train_merge_rules(corpus * copies, 10_000, 1)
    assert codec_of(rules).encode(corpus * copies) == [255 + len(rules)]


def test_rules_that_spell_one_piece_twice_never_reach_the_library() -> None:
    rules = ((97, 98, 256), (98, 99, 257), (97, 257, 258), (256, 99, 259))
    with mock.patch.object(BpeCodec, "_library", None):
        assert codec_of(rules).encode(b"abcbcabc") == [259, 257, 259]


def test_learned_rules_go_to_the_library() -> None:
    codec = codec_of(train_merge_rules(b"abcabcab", 260, 1))
    with mock.patch.object(bpe_codec, "_encode_by_passes", None):
        assert codec.encode(b"abcab") == reference.encode(b"abcab", codec.spec.merge_rules)


@needs_shared_data
def test_long_text_encodes_as_one_sequence() -> None:
    text = (SHARED_DATA / "tinyshakespeare.txt").read_bytes()[:30_000]
    rules = train_merge_rules(text, 400, 2)
    codec = codec_of(rules)
    assert len(list(codec._chunks(text))) > 20
    assert codec.encode(text) == reference.encode(text, rules)


def test_a_cut_falls_only_where_no_rule_merges() -> None:
    codec = codec_of(((97, 97, 256), (256, 98, 257)))
    with mock.patch.object(bpe_codec, "_CHUNK_LENGTH", 2):
        assert list(codec._chunks(b"aaaabbaab")) == ["aaaab", "b", "aab"]


def test_a_long_run_without_a_safe_cut_is_not_quadratic() -> None:
    codec = codec_of(train_merge_rules(b"a" * 4096, 300, 2))
    codec.encode(b"a")
    start = time.process_time()
    ids = codec.encode(b"a" * 400_001)
    assert time.process_time() - start < 10
    assert b"".join(codec.pieces[token_id] for token_id in ids) == b"a" * 400_001


def test_rules_that_spell_terabytes_are_refused() -> None:
    doubling = ((97, 97, 256), *((result - 1, result - 1, result) for result in range(257, 296)))
    with pytest.raises(TokenizerError, match="over the limit"):
        codec_of(doubling)
