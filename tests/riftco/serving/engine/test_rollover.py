"""A full context: `slide`, `half` and `stop` against full forwards over the windows that define them."""

from random import Random

import numpy as np
import pytest

from artifacts import ModelBundle
from riftco.serving import TemperatureSampler
from riftco.serving.engine import GenerationRequest, SamplingParams
from tests.riftco.serving.engine.live import (
    Answer,
    ask,
    ask_one,
    engine,
    exact_logits,
    random_bundle,
    random_ids,
    random_runtime,
)
from tests.riftco.serving.models import last_logits

ROUNDING = (
    1e-5  # of logits in float32; a draw's random number within this of a boundary may give either token
)


def check(model: ModelBundle, prompt: tuple[int, ...], answer: Answer, overflow: str, seed: int) -> None:
    """Each token and log-probability is that of a draw from a full forward in binary64 over its window."""
    context, random = model.config.maximum_context, Random(seed)
    tokens, start = list(prompt), max(0, len(prompt) - context)
    for token, logprob in zip(answer.token_ids, answer.logprobs, strict=True):
        logits = exact_logits(model, tokens[start:])[-1]
        uniform = random.random()
        assert token in (_draw(logits, uniform - ROUNDING), _draw(logits, uniform + ROUNDING))
        assert logprob.logprob == pytest.approx(_log_softmax(logits)[token], abs=2 * ROUNDING)
        tokens.append(token)
        if len(tokens) - start > context:
            start = len(tokens) - (context if overflow == "slide" else -(-context // 2))


def _draw(logits: np.ndarray, uniform: float) -> int:
    order = np.argsort(-logits, kind="stable")
    cumulative = np.exp(_log_softmax(logits)[order]).cumsum()
    return int(order[min(np.searchsorted(cumulative, uniform, side="right"), len(order) - 1)])


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    below = logits - logits.max()
    return below - np.log(np.exp(below).sum())


@pytest.mark.parametrize("overflow", ["slide", "half"])
@pytest.mark.parametrize("context", [1, 5, 16])
def test_each_token_follows_from_its_own_window(overflow: str, context: int) -> None:
    """Prompts shorter and longer than the context, together, in pages that do not divide it."""
    model = random_bundle(context)
    requests = [
        GenerationRequest(
            random_ids(length, length),
            30,
            SamplingParams(1.0, seed=length),
            overflow=overflow,  # type: ignore[arg-type]
            top_logprobs=0,
        )
        for length in (1, context, context + 1, 3 * context)
    ]
    with engine(model, kv_cache_block_size=3) as live:
        answers = ask(live, requests, at_once=4)
    for request, (answer,) in zip(requests, answers, strict=True):
        assert (len(answer.token_ids), answer.finish) == (30, "length")
        check(model, request.prompt_ids, answer, overflow, request.sampling.seed)


def test_sliding_equals_the_live_model_over_the_newest_window_for_300_tokens() -> None:
    prompt = random_ids(1, 5)
    with engine(random_bundle(32)) as live:
        answer = ask_one(live, prompt, 300, temperature=1.0, seed=4)
    tokens, sampler, model = list(prompt), TemperatureSampler(1.0, seed=4), random_runtime(32).model
    for _ in range(300):
        tokens.append(sampler(last_logits(model, tokens[-32:])))
    assert answer.token_ids == tuple(tokens[5:])


def test_half_differs_from_slide_only_after_the_context_is_full() -> None:
    with engine(random_bundle(16)) as live:
        slide, half = (
            ask_one(live, random_ids(2, 10), 30, temperature=1.0, overflow=overflow)
            for overflow in ("slide", "half")
        )
    assert slide.token_ids[:7] == half.token_ids[:7]  # the seventh was sampled from a full context
    assert slide.token_ids != half.token_ids


def test_half_replays_once_in_half_a_context() -> None:
    """It is there to be cheap: 8 windows of 16 for 64 tokens, where `slide` replays one for each."""
    steps = []
    for overflow in ("slide", "half"):
        with engine(random_bundle(16), step_tokens=1, maximum_running=1) as live:
            ask_one(live, random_ids(2, 16), 65, overflow=overflow)
            steps.append(live.stats().steps)
    assert steps == [16 * 65, 16 + 64 + 7 * 8]


@pytest.mark.parametrize(("length", "count"), [(1, 15), (15, 1), (9, 7)])
def test_stop_ends_where_the_context_is_full(length: int, count: int) -> None:
    model, prompt = random_bundle(16), random_ids(3, length)
    with engine(model) as live:
        answer = ask_one(live, prompt, 50, overflow="stop", temperature=1.0, seed=1, top_logprobs=0)
        exactly = ask_one(live, prompt, count, overflow="stop", temperature=1.0, seed=1, top_logprobs=0)
    assert (len(answer.token_ids), answer.finish) == (count, "length")
    assert answer == exactly
    check(model, prompt, answer, "stop", 1)


def test_stop_refuses_a_prompt_that_leaves_no_room() -> None:
    with engine(random_bundle(16)) as live:
        for length in (16, 40):
            with pytest.raises(ValueError, match=f"prompt has {length} tokens and the context 16"):
                ask_one(live, random_ids(4, length), 1, overflow="stop")
        assert ask_one(live, random_ids(4, 15), 1, overflow="stop").finish == "length"


@pytest.mark.soak
@pytest.mark.parametrize("overflow", ["slide", "half"])
def test_ten_thousand_tokens_beyond_a_context_of_256(overflow: str) -> None:
    model, prompt = random_bundle(256), random_ids(5, 250)
    with engine(model) as live:
        answer = ask_one(live, prompt, 10_000, overflow=overflow, temperature=1.0, seed=9, top_logprobs=0)
    assert len(answer.token_ids) == 10_000
    check(model, prompt, answer, overflow, 9)
