"""Beginnings that prompts have in common: found in the cache, counted exactly, never between salts."""

from collections.abc import Sequence

import pytest

from riftco.serving.engine import GenerationRequest, SamplingParams
from tests.riftco.serving.engine.live import Answer, ask, ask_one, engine, random_bundle, random_ids

PAGE = 16
CONTEXT = 128


def cached(answer: Answer) -> int:
    assert answer.usage is not None
    return answer.usage.cached_tokens


@pytest.mark.parametrize("at_once", [1, 10])
def test_fifty_prompts_that_share_three_quarters(at_once: int) -> None:
    """The first computes the 90 tokens, the others find the five whole pages of them."""
    model, stem = random_bundle(CONTEXT), random_ids(1, 90)
    requests = [GenerationRequest(stem + random_ids(2 + i, 30), 4, top_logprobs=5) for i in range(50)]
    with engine(model, prefix_cache=False) as live:
        expected = ask(live, requests, at_once=10)
        assert live.stats().cached_tokens == 0
    with engine(model) as live:
        first = ask(live, requests[:1])
        answers = first + ask(live, requests[1:], at_once=at_once)
        stats = live.stats()
    assert answers == expected
    assert [cached(answer) for (answer,) in answers] == [0] + [80] * 49
    assert stats.cached_tokens == 49 * 80
    assert (stats.prompt_tokens, stats.generated_tokens) == (50 * 120, 50 * 4)


@pytest.mark.parametrize("at_once", [8, 50])
def test_at_least_seven_tenths_of_the_tokens_come_from_the_cache(at_once: int) -> None:
    """Even if all come at once: those of the first step alone compute what they share."""
    stem = random_ids(1, 96)
    requests = [GenerationRequest(stem + random_ids(2 + i, 32), 2) for i in range(50)]
    with engine(random_bundle(160)) as live:
        ask(live, requests, at_once=at_once)
        stats = live.stats()
    assert stats.cached_tokens % 96 == 0
    assert stats.cached_tokens >= 0.7 * stats.prompt_tokens


@pytest.mark.parametrize("length", [n * PAGE + more for n in (1, 2, 8) for more in (-1, 0, 1)])
def test_a_prompt_again_computes_its_last_token_at_least(length: int) -> None:
    """Also where all of it is cached, and where it is longer than the context."""
    prompt = random_ids(length, length)
    with engine(random_bundle(CONTEXT), prefix_cache=False) as live:
        expected = ask_one(live, prompt, 20, temperature=1.0, seed=3, top_logprobs=5)
    with engine(random_bundle(CONTEXT)) as live:
        twice = [ask_one(live, prompt, 20, temperature=1.0, seed=3, top_logprobs=5) for _ in range(3)]
    assert twice == [expected] * 3
    window = min(length, CONTEXT)
    found = window - 1 if window % PAGE == 0 else window // PAGE * PAGE
    assert [cached(answer) for answer in twice] == [0, found, found]


def test_a_cached_prompt_goes_on_differently_for_several_at_once() -> None:
    """Each copies the last page before it writes there; none sees the others' tokens."""
    prompt = random_ids(5, 2 * PAGE)
    requests = [GenerationRequest(prompt, 24, SamplingParams(1.0, seed=i), top_logprobs=5) for i in range(12)]
    with engine(random_bundle(CONTEXT), prefix_cache=False) as live:
        expected = ask(live, requests)
    with engine(random_bundle(CONTEXT)) as live:
        ask_one(live, prompt, 1)
        assert ask(live, requests, at_once=12) == expected
        assert live.stats().cached_tokens == 12 * (2 * PAGE - 1)
    assert len({answer.token_ids for (answer,) in expected}) == 12


def test_what_was_generated_is_found_by_the_next_turn() -> None:
    prompt = random_ids(6, 20)
    with engine(random_bundle(CONTEXT)) as live:
        first = ask_one(live, prompt, 30, temperature=1.0)
        second = ask_one(live, (*prompt, *first.token_ids, 1, 2, 3), 5, top_logprobs=5)
        assert cached(second) == 48
    with engine(random_bundle(CONTEXT), prefix_cache=False) as live:
        assert ask_one(live, (*prompt, *first.token_ids, 1, 2, 3), 5, top_logprobs=5) == second


def test_salts_never_share() -> None:
    prompt = random_ids(7, 50)
    with engine(random_bundle(CONTEXT)) as live:
        found = [
            cached(ask_one(live, prompt, 2, salt=salt)) for salt in (b"", b"a", b"b", b"a", b"", b"\0", b"ab")
        ]
    assert found == [0, 0, 0, 48, 48, 0, 0]


def test_a_page_is_shared_only_with_all_that_came_before_it() -> None:
    first, second = random_ids(8, PAGE), random_ids(9, PAGE)
    with engine(random_bundle(CONTEXT)) as live:
        ask_one(live, first + second + (1,), 1)
        assert cached(ask_one(live, second + first + (1,), 1)) == 0
        assert cached(ask_one(live, first + first + (1,), 1)) == PAGE
        assert cached(ask_one(live, first + second + (2,), 1)) == 2 * PAGE


def test_windows_that_slid_leave_nothing_to_find() -> None:
    """Their pages hold other positions than the tokens had; what is found afterwards is right."""
    prompt = random_ids(10, 60)
    with engine(random_bundle(64)) as live:
        slid = ask_one(live, prompt, 40, temperature=1.0, top_logprobs=5)
        again = ask_one(live, prompt, 40, temperature=1.0, top_logprobs=5)
        tail = (*prompt, *slid.token_ids)[-64:]
        after = ask_one(live, tail, 3, top_logprobs=5)
        assert (cached(again), cached(after)) == (48, 0)
    with engine(random_bundle(64), prefix_cache=False) as live:
        assert ask_one(live, prompt, 40, temperature=1.0, top_logprobs=5) == slid == again
        assert ask_one(live, tail, 3, top_logprobs=5) == after


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("length", [10, 2 * PAGE])
def test_choices_share_the_prompt_and_nothing_else(length: int, prefix_cache: bool) -> None:
    """Choice 0 is the request without choices, the others have random numbers of their own."""
    prompt, sampling = random_ids(11, length), SamplingParams(1.0, seed=8)
    request = GenerationRequest(prompt, 12, sampling, choices=6, top_logprobs=3)
    with engine(random_bundle(CONTEXT), prefix_cache=prefix_cache) as live:
        choices = ask(live, [request])[0]
        computed = [length - cached(choice) for choice in choices]
        alone = ask_one(live, prompt, 12, temperature=1.0, seed=8, top_logprobs=3)
        fewer = ask(live, [GenerationRequest(prompt, 12, sampling, choices=3, top_logprobs=3)])[0]
    assert len({choice.token_ids for choice in choices}) == 6
    assert choices[0] == alone
    assert choices[:3] == fewer
    shared = length - 1 if length % PAGE == 0 else 0
    assert computed == [length] + [length - shared * prefix_cache] * 5


def test_greedy_choices_are_the_same() -> None:
    with engine(random_bundle(CONTEXT)) as live:
        request = GenerationRequest(random_ids(12, 9), 6, choices=3)
        assert len({choice.token_ids for choice in ask(live, [request])[0]}) == 1


def test_preempted_requests_keep_their_random_numbers() -> None:
    """A pool of one context and a half for eight that want a context each."""
    requests = [
        GenerationRequest(random_ids(13 + i, 20), 40, SamplingParams(1.3, seed=i), choices=1 + i % 2)
        for i in range(8)
    ]
    with engine(random_bundle(64)) as live:
        expected = ask(live, requests)
        assert live.stats().preemptions == 0
    with engine(random_bundle(64), kv_cache_block_count=6) as live:
        assert ask(live, requests, at_once=8) == expected
        assert live.stats().preemptions > 4
        assert live.stats().generated_tokens == 12 * 40


def test_a_pool_of_one_context_serves_everybody_in_turn() -> None:
    """Fully cached prompts too, for which a page and its copy would not fit."""
    prompts: Sequence[tuple[int, ...]] = [random_ids(20, 64), random_ids(21, 48), random_ids(20, 64)]
    requests = [
        GenerationRequest(p, 5, SamplingParams(1.0), top_logprobs=2) for p in prompts for _ in range(3)
    ]
    with engine(random_bundle(64), prefix_cache=False) as live:
        expected = ask(live, requests)
    with engine(random_bundle(64), kv_cache_block_count=4) as live:
        assert ask(live, requests, at_once=9) == expected


def test_a_cached_page_is_forgotten_when_its_room_is_needed() -> None:
    prompt = random_ids(30, 40)
    with engine(random_bundle(64), kv_cache_block_count=4) as live:
        ask_one(live, prompt, 1)
        assert cached(ask_one(live, prompt, 1)) == 32
        ask_one(live, random_ids(31, 60), 1)
        assert live.stats().cached_pages == 3
        assert cached(ask_one(live, prompt, 1)) == 0
