"""The same request gets the same tokens and the same bits of every log-probability, whatever the load."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from artifacts import ModelBundle
from kernels import DecodeStep, dispatch
from riftco.serving.engine import Engine, Event, GenerationRequest, SamplingParams
from tests.riftco.serving.engine.live import Answer, ask, engine, random_bundle
from tests.riftco.serving.models import bundle

ALONE = {"maximum_running": 1, "prefix_cache": False, "threads": 1}
CONTEXT = 64

# How many requests, how many at once, settings: each load moves several of chunks, pages, cache and threads.
LOADS: list[tuple[int, int, dict[str, Any]]] = [
    (200, 32, {"step_tokens": 32, "kv_cache_block_size": 7, "threads": 2}),
    (200, 17, {"kv_cache": "contiguous", "step_tokens": CONTEXT}),
    (50, 8, {}),
    (50, 3, {"step_tokens": 5, "maximum_running": 3, "kv_cache_block_size": 1}),
    (50, 6, {"prefix_cache": False, "kv_cache_block_size": 64, "maximum_running": 5, "step_tokens": 40}),
]
TIGHT = {"kv_cache_block_count": 13, "kv_cache_block_size": 5, "step_tokens": 33}


def requests(count: int, model: ModelBundle, seed: int = 0) -> list[GenerationRequest]:
    """Prompts up to twice the context, many with a beginning in common, sampled in every way."""
    random = np.random.default_rng(seed)
    size, context = model.config.vocabulary_size, model.config.maximum_context

    def tokens(most: int) -> tuple[int, ...]:
        return tuple(random.integers(0, size, random.integers(1, most + 1)).tolist())

    stems = [tokens(context) for _ in range(6)]

    def one() -> GenerationRequest:
        prompt = tokens(context)
        if random.random() < 0.6:
            prompt = (*stems[random.integers(6)], *prompt[: random.integers(1, context)])
        penalties = random.choice([0.0, 0.4, -0.3], 2) if random.random() < 0.3 else (0.0, 0.0)
        sampling = SamplingParams(
            temperature=float(random.choice([0, 0.7, 1, 1.6])),
            top_k=int(random.integers(1, size + 1)) if random.random() < 0.3 else None,
            top_p=float(random.choice([1, 1, 0.8])),
            min_p=float(random.choice([0, 0, 0.02])),
            repetition_penalty=float(random.choice([1, 1, 1.3])),
            presence_penalty=float(penalties[0]),
            frequency_penalty=float(penalties[1]),
            seed=int(random.integers(2**63)),
        )
        return GenerationRequest(
            prompt,
            int(random.integers(1, 13)),
            sampling,
            choices=int(random.choice([1, 1, 1, 1, 1, 1, 3])),
            overflow=random.choice(
                ["slide", "half"] if len(prompt) >= context else ["slide", "half", "stop"]
            ),
            top_logprobs=int(random.choice([0, 5, 20])),
            salt=random.choice([b"", b"key"]),
        )

    return [one() for _ in range(count)]


def alone(count: int, model: ModelBundle, weights: str = "float32") -> list[list[Answer]]:
    """The first `count` requests, each by itself, its prompt in one piece, nothing cached."""
    known = _alone.setdefault((model, weights), [])
    if len(known) < count:
        with engine(model, weights=weights, **ALONE) as live:
            known += ask(live, requests(count, model)[len(known) :])
    return known[:count]


_alone: dict[tuple[ModelBundle, str], list[list[Answer]]] = {}


def different(count: int, model: ModelBundle, at_once: int, weights: str = "float32", **settings: Any) -> int:
    """How many requests are answered otherwise under a load than alone."""
    with engine(model, weights=weights, **settings) as live:
        answers = ask(live, requests(count, model), at_once=at_once)
    return sum(one != other for one, other in zip(answers, alone(count, model, weights), strict=True))


@pytest.mark.parametrize(("count", "at_once", "settings"), LOADS)
def test_answers_do_not_depend_on_company_chunks_pages_cache_and_threads(
    count: int, at_once: int, settings: dict[str, Any]
) -> None:
    assert different(count, random_bundle(), at_once, **settings) == 0


def test_requests_were_answered_in_every_way() -> None:
    """The comparison above is between answers worth comparing."""
    answers = [answer for choices in alone(200, random_bundle()) for answer in choices]
    assert {answer.finish for answer in answers} == {"length"}
    assert len({answer.token_ids for answer in answers}) > 200
    assert len({one.logprob for answer in answers for one in answer.logprobs}) > 1000


def test_answers_do_not_depend_on_preemption() -> None:
    model = random_bundle()
    with engine(model, **TIGHT) as live:
        answers = ask(live, requests(200, model), at_once=12)
        assert live.stats().preemptions > 20
        assert live.stats().cached_tokens > 500
    assert answers == alone(200, model)


def test_answers_do_not_depend_on_chunks_of_a_single_token() -> None:
    model = random_bundle()
    with engine(model, step_tokens=1, maximum_running=1) as live:
        assert ask(live, requests(200, model)[:15], at_once=4) == alone(15, model)


def test_answers_do_not_depend_on_neighbours_that_leave() -> None:
    """While half the requests run, others come and are cancelled, waiting or after any number of tokens."""
    model = random_bundle()
    wanted = requests(200, model)[:60]
    with engine(model, **TIGHT) as live:
        answers = ask(live, wanted, at_once=5, listen=_neighbours(live, requests(200, model)[100:]))
        counts = live.stats().requests_finished
        assert counts["cancelled"] > 20
    assert answers == alone(60, model)


def _neighbours(live: Engine, guests: list[GenerationRequest]) -> Callable[[int, Event], None]:
    def listen(index: int, event: Event) -> None:
        if event.finish and guests:
            patience, number = index % 5, [0]

            def leave(_: Event) -> None:
                nonlocal patience
                patience -= 1
                if not patience:
                    live.cancel(number[0])

            number[0] = live.submit(guests.pop(), leave)
            if not patience:
                live.cancel(number[0])

    return listen


@pytest.mark.parametrize("weights", ["bfloat16", "int8", "nf4"])
def test_answers_do_not_depend_on_load_with_rounded_weights(weights: str) -> None:
    assert different(30, random_bundle(), 9, weights, **TIGHT, threads=2) == 0


def test_answers_do_not_depend_on_load_with_a_trained_model() -> None:
    assert different(50, bundle("bpe"), 7, step_tokens=32, kv_cache_block_size=3) == 0


def test_answers_do_not_depend_on_load_without_native_code() -> None:
    model = random_bundle(16, width=8, layers=1)
    with dispatch.use("torch"):
        assert different(8, model, 6, step_tokens=32, kv_cache_block_size=4) == 0


def test_a_last_bit_that_depends_on_company_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: one unit in the last place of the logits is enough."""
    model, real = random_bundle(), DecodeStep.__call__
    expected = alone(5, model)

    def dependent(step: DecodeStep, token_ids: torch.Tensor, *rest: object) -> torch.Tensor:
        logits = real(step, token_ids, *rest)  # type: ignore[arg-type]
        return torch.nextafter(logits, logits + 1) if len(token_ids) > 1 else logits

    with engine(model, **ALONE) as live, monkeypatch.context() as patched:
        patched.setattr(DecodeStep, "__call__", dependent)
        found = ask(live, requests(5, model))
    assert found != expected


@pytest.mark.soak
@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8", "nf4"])
def test_a_thousand_requests_under_every_load(weights: str) -> None:
    model = random_bundle()
    kinds = [TIGHT, {"prefix_cache": False}, {"step_tokens": 32, "kv_cache_block_size": 9}]
    for number, (at_once, threads) in enumerate(product((1, 2, 7, 16, 32), (1, 2))):
        assert different(1000, model, at_once, weights, threads=threads, **kinds[number % 3]) == 0
    for chunk in range(1, CONTEXT + 1):
        settings = {"step_tokens": chunk, "maximum_running": min(chunk, 32)}
        assert different(100, model, 32, weights, **settings) == 0


@pytest.mark.soak
@pytest.mark.parametrize("name", ["byte", "bpe", "bpe-lora-child", "bpe-qlora-child"])
def test_a_thousand_requests_to_a_trained_model(name: str) -> None:
    for at_once in (2, 32):
        assert different(1000, bundle(name), at_once, kv_cache_block_size=3) == 0
