"""Training must learn the rules that recounting everything before each merge would learn."""

import base64

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from riftco.tokenizer.bpe_training import train_merge_rules
from tests.riftco.tokenizer import reference
from tests.support import SHARED_DATA, fixture, needs_shared_data

runs = st.lists(st.tuples(st.sampled_from(b"abc"), st.integers(1, 12)), max_size=25).map(
    lambda parts: b"".join(bytes([letter]) * length for letter, length in parts)
)
letters = st.one_of(
    st.lists(st.sampled_from(alphabet), max_size=120).map(bytes) for alphabet in (b"ab", b"abc", b"\x00\xff")
)
repeats = st.tuples(st.binary(min_size=1, max_size=6), st.integers(1, 30)).map(lambda pair: pair[0] * pair[1])


@pytest.mark.parametrize("case", fixture("tokenizer.json")["bpe_training"], ids=range(8))
def test_rules_are_those_of_the_original(case: dict) -> None:
    rules = train_merge_rules(
        base64.b64decode(case["corpus_base64"]), case["vocabulary_size"], case["minimum_pair_frequency"]
    )
    assert [list(rule) for rule in rules] == case["merge_rules"]


@given(
    corpus=st.one_of(runs, letters, repeats, st.binary(max_size=200)),
    new_ids=st.integers(0, 40),
    minimum_pair_frequency=st.integers(1, 4),
)
@example(corpus=b"aaa", new_ids=3, minimum_pair_frequency=1)
@example(corpus=b"ababababa", new_ids=9, minimum_pair_frequency=1)
@example(corpus=b"aabaaabaaaab", new_ids=9, minimum_pair_frequency=1)
def test_rules_are_those_of_the_recount(corpus: bytes, new_ids: int, minimum_pair_frequency: int) -> None:
    wanted = reference.train(corpus, 256 + new_ids, minimum_pair_frequency)
    assert train_merge_rules(corpus, 256 + new_ids, minimum_pair_frequency) == wanted


def test_rules_are_those_of_the_recount_on_long_random_letters() -> None:
    corpus = np.random.default_rng(7).choice(list(b"ab"), size=20_000).astype(np.uint8).tobytes()
    assert train_merge_rules(corpus, 300, 2) == reference.train(corpus, 300, 2)


@needs_shared_data
def test_rules_are_those_of_the_recount_on_real_text() -> None:
    corpus = (SHARED_DATA / "tinyshakespeare.txt").read_bytes()[:40_000]
    assert train_merge_rules(corpus, 320, 2) == reference.train(corpus, 320, 2)


def test_ties_go_to_the_smallest_pair() -> None:
    assert train_merge_rules(b"zyzy.baba", 257, 2) == ((98, 97, 256),)
    assert train_merge_rules(b"ac.ab", 257, 1) == ((46, 97, 256),)
    assert train_merge_rules(b"acxab", 257, 1) == ((97, 98, 256),)


def test_a_count_equal_to_the_minimum_is_enough() -> None:
    assert train_merge_rules(b"xyxy", 257, 2) == ((120, 121, 256),)
    assert train_merge_rules(b"xyxy", 257, 3) == ()


def test_no_pair_is_frequent_enough_for_an_enormous_minimum() -> None:
    assert train_merge_rules(b"aaaa" * 100, 300, 2**70) == ()


def test_a_long_run_of_one_letter_doubles() -> None:
    assert train_merge_rules(b"a" * 2**20, 300, 2)[:3] == ((97, 97, 256), (256, 256, 257), (257, 257, 258))
    assert len(train_merge_rules(b"a" * 2**20, 300, 2)) == 19
