"""One choice of a request: its window, its states, its random numbers and its pages' keys."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from riftco.serving.engine.request import GenerationRequest, SamplingParams
from riftco.serving.engine.sequence import Sequence, State


def sequence(
    prompt: tuple[int, ...] = (1, 2, 3), capacity: int = 8, choice: int = 0, **options: object
) -> Sequence:
    return Sequence(GenerationRequest(prompt, **options), 1, choice, capacity)  # type: ignore[arg-type]


def uniforms(count: int, choice: int = 0, seed: int = 5, temperature: float = 1.0) -> list[float]:
    one = sequence(choice=choice, sampling=SamplingParams(temperature=temperature, seed=seed))
    drawn = [one.uniform]
    for _ in range(count - 1):
        one.append(0)
        drawn.append(one.uniform)
    return drawn


def test_the_window_is_the_newest_of_the_prompt_that_fits() -> None:
    assert (sequence(tuple(range(8))).start, sequence(tuple(range(11))).start) == (0, 3)
    assert sequence(tuple(range(11))).pending == 8
    assert sequence(tuple(range(11))).prompt_tokens == 11


def test_states() -> None:
    one = sequence()
    assert one.state is State.QUEUED
    one.running = True
    assert one.state is State.PREFILL
    one.computed = 3
    one.append(7)
    assert (one.state, one.pending, one.generated_tokens) == (State.DECODE, 1, 1)
    one.running, one.preempted, one.computed = False, True, 0
    assert one.state is State.PREEMPTED
    one.running = True
    assert one.state is State.PREFILL
    one.slide(2)
    assert (one.state, one.computed, one.pending, one.pages) == (State.REPLAY, 0, 2, [])
    one.computed = 1
    assert one.state is State.DECODE
    one.finish = "length"
    assert one.state is State.FINISHED


def test_the_first_choices_random_numbers_are_those_of_its_seed() -> None:
    random = Random(5)
    assert uniforms(20) == [random.random() for _ in range(20)]


def test_choices_and_seeds_differ_and_repeat() -> None:
    drawn = [tuple(uniforms(3, choice, seed)) for choice in range(8) for seed in (0, 1, 2**64 - 1)]
    assert len(set(drawn)) == len(drawn)
    assert drawn == [tuple(uniforms(3, choice, seed)) for choice in range(8) for seed in (0, 1, 2**64 - 1)]


def test_the_random_numbers_of_other_choices_stay_the_same_between_releases() -> None:
    assert uniforms(2, choice=1) == [0.3208625301497937, 0.17599300670202367]
    assert uniforms(1, choice=2, seed=0) == [0.2345531050180446]


def test_greedy_choices_draw_nothing() -> None:
    assert uniforms(3, temperature=0.0) == [0.0, 0.0, 0.0]


def test_keys_are_those_of_full_pages_only_as_far_as_asked() -> None:
    one = sequence(tuple(range(8)))
    keys = one.page_keys(3, 2)
    assert len(keys) == 2
    assert one.page_keys(3, 1) == keys[:1]
    assert one.page_keys(3, 0) == []
    assert {len(key) for key in keys} == {16}


def test_keys_grow_with_the_tokens_and_do_not_depend_on_when_they_were_asked_for() -> None:
    one, other = sequence(), sequence()
    one.page_keys(2, 1)
    for token in (4, 5, 6):
        one.append(token)
        other.append(token)
        one.page_keys(2, len(one.tokens) // 2)
    assert one.page_keys(2, 3) == other.page_keys(2, 3)


@settings(max_examples=50)
@given(st.data())
def test_keys_agree_exactly_as_far_as_salt_and_tokens_do(data: st.DataObject) -> None:
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=8)
    salts = st.sampled_from((b"", b"x"))
    one, other = data.draw(tokens), data.draw(tokens)
    salt, other_salt = data.draw(salts), data.draw(salts)
    size = data.draw(st.integers(1, 3))
    keys = sequence(tuple(one), salt=salt).page_keys(size, len(one) // size)
    others = sequence(tuple(other), salt=other_salt).page_keys(size, len(other) // size)
    for index in range(min(len(keys), len(others))):
        end = (index + 1) * size
        assert (keys[index] == others[index]) == (salt == other_salt and one[:end] == other[:end])
    assert len(set(keys)) == len(keys)


def test_keys_are_of_the_window_wherever_it_begins() -> None:
    slid = sequence((9, 9, 9, 1, 2, 3, 4, 5, 6, 7, 8))
    assert slid.page_keys(4, 2) == sequence((1, 2, 3, 4, 5, 6, 7, 8)).page_keys(4, 2)
    slid.slide(7)
    assert slid.page_keys(4, 1) == sequence((5, 6, 7, 8)).page_keys(4, 1)


@pytest.mark.parametrize("token", [0, 255, 256, 2**16, 2**32, 2**63])
def test_keys_tell_large_token_ids_apart(token: int) -> None:
    keys = {sequence((token ^ change,)).page_keys(1, 1)[0] for change in (0, 1, 1 << 8, 1 << 40)}
    assert len(keys) == 4
