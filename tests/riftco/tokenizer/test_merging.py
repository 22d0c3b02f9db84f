"""The sequence must collect, find and merge pairs as a plain list would."""

import tracemalloc
from collections import Counter
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from riftco.tokenizer.merging import MergeableSequence
from tests.riftco.tokenizer.reference import replace_pair

small_alphabets = st.one_of(
    st.lists(st.sampled_from(alphabet), max_size=60).map(bytes) for alphabet in (b"a", b"ab", b"abc")
)


@given(data=small_alphabets, picks=st.lists(st.integers(0, 10**6), max_size=8))
def test_any_order_of_merges_gives_the_symbols_and_pairs_of_a_plain_list(
    data: bytes, picks: list[int]
) -> None:
    sequence = MergeableSequence(data)
    collected = sequence.byte_pairs()
    plain = list(data)
    for step, pick in enumerate(picks):
        counts = Counter(pairwise(plain))
        if not counts:
            break
        pair = sorted(counts)[pick % len(counts)]
        occurrences = sequence.occurrences(pair, collected[pair])
        assert len(occurrences) == counts[pair]
        assert np.all(np.diff(occurrences) > 0)
        collected |= sequence.merge(pair, occurrences, 256 + step)
        plain = replace_pair(plain, (*pair, 256 + step))
        assert sequence.symbols() == plain


@given(data=small_alphabets, minimum_count=st.integers(1, 6))
def test_rare_pairs_are_left_out(data: bytes, minimum_count: int) -> None:
    counts = Counter(pairwise(data))
    collected = MergeableSequence(data).byte_pairs(minimum_count)
    assert {pair: len(slots) for pair, slots in collected.items()} == {
        pair: count for pair, count in counts.items() if count >= minimum_count
    }


def test_collecting_pairs_takes_at_most_38_bytes_for_each_byte() -> None:
    data = b"the cat sat on a mat. " * 10_000
    tracemalloc.start()
    MergeableSequence(data).byte_pairs()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 38 * len(data)


def test_overlapping_occurrences_all_count() -> None:
    assert MergeableSequence(b"aaaa").byte_pairs()[97, 97].tolist() == [0, 1, 2]


def test_a_merged_pair_next_to_itself_is_one_new_pair() -> None:
    sequence = MergeableSequence(b"ababab")
    pair = (97, 98)
    made = sequence.merge(pair, sequence.occurrences(pair, sequence.byte_pairs()[pair]), 256)
    assert {pair: slots.tolist() for pair, slots in made.items()} == {(256, 256): [0, 2]}


def test_texts_too_short_for_a_pair_have_none() -> None:
    for data in (b"", b"x"):
        sequence = MergeableSequence(data)
        assert sequence.byte_pairs() == {}
        assert sequence.symbols() == list(data)
