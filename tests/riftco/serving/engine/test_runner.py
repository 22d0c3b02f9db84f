"""The model runner: logits of every kind of plan, settings of the draw, broken models, no native code."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch

from artifacts import ModelBundle
from kernels import DecodeStep, dequantize_nf4, dispatch, quantize_nf4
from kernels.decode_step.int8 import Int8Weight
from riftco.config import ServingConfig
from riftco.serving import ModelService, TemperatureSampler
from riftco.serving.engine import GenerationRequest, ModelRunner, SamplingParams, Sequence
from riftco.serving.engine.request import Drawn
from riftco.serving.engine.scheduler import Plan, Work
from tests.riftco.serving.engine.live import (
    ask,
    ask_one,
    bundle_of,
    changed,
    engine,
    exact_logits,
    random_bundle,
    random_ids,
)

SMALL = 20  # a vocabulary of which all log-probabilities can be asked for, which are the logits but for a sum
CONTEXT, PAGE = 24, 4


def small_bundle(context: int = CONTEXT) -> ModelBundle:
    return random_bundle(context, width=16, layers=2, vocabulary=SMALL)


class Rows:
    """Sequences on pages of their own choice, and plans made of them by hand."""

    def __init__(self, bundle: ModelBundle, **settings: object) -> None:
        self.bundle = bundle
        self.half_pages = settings.get("weights", "float32") != "float32"
        self.tolerance = 5e-3 if self.half_pages else 2e-5  # a value next to a boundary is rounded otherwise
        self.runner = ModelRunner(bundle, page_count=40, page_size=PAGE, **settings)  # type: ignore[arg-type]

    def sequence(self, tokens: tuple[int, ...], pages: list[int], **sampling: object) -> Sequence:
        request = GenerationRequest(tokens, 99, SamplingParams(**sampling), top_logprobs=SMALL)  # type: ignore[arg-type]
        sequence = Sequence(request, 1, 0, CONTEXT)
        sequence.pages = pages
        return sequence

    def run(self, *work: tuple[Sequence, int], copies: tuple[tuple[int, int], ...] = ()) -> list[Drawn]:
        """Compute the next so many tokens of each sequence; those that are then complete sample."""
        planned = [Work(s, s.computed, count, count == s.pending, (), False) for s, count in work]
        drawn = self.runner.run(Plan(tuple(planned), copies))
        for sequence, count in work:
            sequence.computed += count
        samples = [one.sequence for one in planned if one.samples]
        for sequence, one in zip(samples, drawn, strict=True):
            self.compare(sequence, one)
            sequence.append(one.token_id)
        return drawn

    def compare(self, sequence: Sequence, drawn: Drawn) -> None:
        """All log-probabilities are those of a full forward in binary64 over the window."""
        logits = exact_logits(self.bundle, sequence.tokens[sequence.start :], half_pages=self.half_pages)[-1]
        assert drawn.logprob is not None
        found = dict(drawn.logprob.top)
        assert len(found) == SMALL
        expected = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        np.testing.assert_allclose([found[i] for i in range(SMALL)], expected, atol=self.tolerance)
        assert drawn.token_id == drawn.logprob.token_id
        assert drawn.logprob.logprob == found[drawn.token_id]
        order = sorted(found, key=lambda i: (-found[i], i))
        assert [i for i, _ in drawn.logprob.top] == order


def ids(seed: int, count: int) -> tuple[int, ...]:
    return tuple(i % SMALL for i in random_ids(seed, count))


def rounded(bundle: ModelBundle, kind: str) -> ModelBundle:
    """The bundle with the weights of its linear layers rounded as that kind of storage does."""
    tensors = {}
    for name, values in bundle.tensors().items():
        weight = torch.tensor(values)
        if values.ndim == 2 and "embedding" not in name:
            weight = {
                "bfloat16": lambda x: x.bfloat16().float(),
                "int8": lambda x: Int8Weight.quantize(x).dequantize(),
                "nf4": lambda x: dequantize_nf4(quantize_nf4(x)),
            }[kind](weight)
        tensors[name] = weight.numpy()
    return bundle_of(bundle.config, tensors)


@pytest.mark.parametrize("mode", ["deterministic", "fast"])
@pytest.mark.parametrize("native", [True, False])
def test_chunks_and_single_tokens_of_several_sequences(mode: str, native: bool) -> None:
    with dispatch.use("native" if native else "torch"):
        rows = Rows(small_bundle(), mode=mode)
    a, b, c = (
        rows.sequence(ids(1, 11), [7, 3, 30]),
        rows.sequence(ids(2, 3), [0]),
        rows.sequence(ids(3, 9), [11, 2, 39]),
    )
    assert rows.run((a, 5)) == []
    rows.run((a, 6), (b, 3))
    a.pages.append(21)
    rows.run((a, 1), (b, 1), (c, 7))
    b.pages.append(14)
    rows.run((c, 2), (b, 1), (a, 1))
    rows.run((a, 1), (c, 1))


def test_a_copied_page_goes_its_own_way() -> None:
    rows = Rows(small_bundle())
    prompt = ids(4, 8)
    first = rows.sequence(prompt, [5, 6])
    rows.run((first, 8))
    second = rows.sequence(prompt, [5, 9], temperature=1.0, seed=1)
    second.computed = 7
    first.pages.append(7)
    rows.run((second, 1), (first, 1), copies=((6, 9),))
    second.tokens[-1] = (first.tokens[-2] + 1) % SMALL
    second.pages.append(8)
    for _ in range(3):
        rows.run((second, 1), (first, 1))


def test_a_prompt_longer_than_the_context_is_seen_from_its_end() -> None:
    rows = Rows(small_bundle())
    sequence = rows.sequence(ids(5, CONTEXT + 7), [1, 2, 3, 4, 5, 6])
    assert sequence.start == 7
    rows.run((sequence, 10))
    rows.run((sequence, 14))


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "nf4"])
@pytest.mark.parametrize("native", [True, False])
def test_weights_are_rounded_as_asked_and_nothing_else(kind: str, native: bool) -> None:
    exact = small_bundle()
    with dispatch.use("native" if native else "torch"):
        rows = Rows(exact, weights=kind)
    rows.bundle = rounded(exact, kind)
    if native and kind == "int8":
        rows.tolerance = 5e-2  # what weights are multiplied with has 8 bits too
    sequence = rows.sequence(ids(6, 11), [4, 1, 0])
    rows.run((sequence, 11))
    rows.run((sequence, 1))


def test_the_norms_have_the_models_own_epsilon() -> None:
    bundle = small_bundle()
    rows = Rows(bundle_of(replace(bundle.config, layer_norm_epsilon=0.5), bundle.tensors()))
    rows.run((rows.sequence(ids(7, 6), [3, 8]), 6))


@pytest.mark.parametrize("threads", [None, 3])
def test_a_step_takes_as_many_threads_as_it_may(threads: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    real = DecodeStep.__call__

    def listening(*arguments: object) -> torch.Tensor:
        given.append(arguments[-1])
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(DecodeStep, "__call__", listening)
    rows = Rows(small_bundle(), threads=threads)
    rows.run((rows.sequence(ids(7, 6), [3, 8]), 6))
    assert given == [threads]


def reference_draw(
    logits: np.ndarray,
    sampling: SamplingParams,
    prompt: tuple[int, ...],
    generated: list[int],
    uniform: float,
) -> int:
    """The draw as its definition reads: penalties, temperature, top-k, top-p, min-p, cumulative weights."""
    logits = logits.copy()
    counts = np.bincount(generated, minlength=len(logits)) if generated else np.zeros(len(logits), int)
    for i in {*prompt, *generated}:
        logits[i] = (
            logits[i] / sampling.repetition_penalty
            if logits[i] > 0
            else logits[i] * sampling.repetition_penalty
        )
    logits -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
    order = np.argsort(-logits, kind="stable")
    if not sampling.temperature:
        return int(order[0])
    weights = np.exp((logits[order] - logits[order[0]]) / sampling.temperature)[: sampling.top_k]
    cumulative = np.cumsum(weights)
    weights = weights[: 1 + int(np.searchsorted(cumulative, sampling.top_p * cumulative[-1]))]
    weights = weights[: max(1, int((weights >= sampling.min_p).sum()))]
    return int(order[np.searchsorted(np.cumsum(weights), uniform * weights.sum(), side="right")])


SETTINGS = [
    SamplingParams(),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(presence_penalty=2.5, frequency_penalty=0.7),
    SamplingParams(0.7, seed=1),
    SamplingParams(1.3, top_k=3, seed=2),
    SamplingParams(1.5, top_p=0.6, seed=3),
    SamplingParams(2.0, min_p=0.2, seed=4),
    SamplingParams(1.0, 9, 0.9, 0.05, 1.2, 0.5, 0.3, seed=5),
    SamplingParams(0.8, repetition_penalty=0.7, presence_penalty=-1.0, frequency_penalty=-0.4, seed=6),
]


def test_every_setting_of_the_draw_against_its_definition_in_any_company() -> None:
    bundle = random_bundle()
    requests = [GenerationRequest(random_ids(10 + i, 9), 16, s) for i, s in enumerate(SETTINGS)]
    with engine(bundle) as live:
        together = ask(live, requests, at_once=len(requests))
    for request, (answer,) in zip(requests, together, strict=True):
        random, tokens = Random(request.sampling.seed), list(request.prompt_ids)
        for _ in range(16):
            logits = exact_logits(bundle, tokens)[-1]
            generated = tokens[len(request.prompt_ids) :]
            tokens.append(
                reference_draw(logits, request.sampling, request.prompt_ids, generated, random.random())
            )
        assert answer.token_ids == tuple(tokens[-16:]), request.sampling


def test_penalties_are_for_the_whole_prompt_where_the_context_has_forgotten_its_beginning() -> None:
    window = random_ids(50, 64)
    with engine(random_bundle()) as live:
        likeliest = ask_one(live, window, 1, repetition_penalty=50.0).token_ids
        assert likeliest[0] not in window
        assert ask_one(live, likeliest + window, 1, repetition_penalty=50.0).token_ids != likeliest


def test_penalties_are_needed_for_those_tokens() -> None:
    """Each setting above gives other tokens than the same without it: none is there for nothing."""
    plain = {"temperature": 0.0, "seed": 5}
    with engine(random_bundle()) as live:
        prompt = random_ids(11, 9)
        found = {
            ask_one(live, prompt, 16, **{**plain, name: value}).token_ids
            for name, value in [("seed", 5), ("repetition_penalty", 1.3), ("presence_penalty", 2.5)]
        }
    assert len(found) == 3


def test_a_seed_gives_the_contracts_tokens() -> None:
    """Without penalties and cuts but top-k, the draw is the contract's sampler, token for token."""
    bundle, prompt = random_bundle(), random_ids(12, 7)
    seeds = [0, 1, 2, 2**32, 2**64 - 1]
    requests = [GenerationRequest(prompt, 12, SamplingParams(1.1, 30, seed=seed)) for seed in seeds]
    with engine(bundle) as live:
        answers = ask(live, requests, at_once=len(seeds))
    for seed, (answer,) in zip(seeds, answers, strict=True):
        sampler, tokens = TemperatureSampler(1.1, top_k=30, seed=seed), list(prompt)
        for _ in range(12):
            tokens.append(sampler(exact_logits(bundle, tokens)[-1]))
        assert answer.token_ids == tuple(tokens[7:])


def test_log_probabilities_are_finite_and_of_the_unpenalized_distribution() -> None:
    def spread(bias: np.ndarray) -> None:
        bias[:3], bias[3] = -1e38, 1e38

    bundle = changed(random_bundle(), "language_model_head.bias", spread)
    with engine(bundle) as live:
        answer = ask_one(live, (9,), 3, top_logprobs=20, repetition_penalty=1.5)
        only = ask_one(live, (9,), 1, top_logprobs=0).logprobs[0]
    assert answer.token_ids == (3, 3, 3)
    for one in answer.logprobs:
        assert one.logprob == 0.0
        assert one.top[0] == (3, 0.0)
        assert all(np.isfinite(p) for _, p in one.top)
        assert min(p for _, p in one.top) == pytest.approx(-1e38)
    assert (only.token_id, only.top) == (3, ())


def test_equal_logits_are_told_in_the_order_of_their_ids() -> None:
    bundle = random_bundle()
    for name in ("language_model_head.weight", "language_model_head.bias"):
        bundle = changed(bundle, name, lambda values: values.fill(0))
    with engine(bundle) as live:
        answer = ask_one(live, (9, 8), 2, top_logprobs=4)
    assert answer.token_ids == (0, 0)
    assert [i for i, _ in answer.logprobs[0].top] == [0, 1, 2, 3]
    assert answer.logprobs[0].logprob == pytest.approx(-np.log(80))


def test_more_log_probabilities_than_tokens() -> None:
    with engine(random_bundle(8, width=8, layers=1, vocabulary=5)) as live:
        answer = ask_one(live, (1, 2), 2, top_logprobs=20)
    assert [len(one.top) for one in answer.logprobs] == [5, 5]
    for one in answer.logprobs:
        assert np.exp([p for _, p in one.top]).sum() == pytest.approx(1)


@pytest.fixture(scope="module")
def spoilt() -> ModelBundle:
    """A model of finite weights that gives NaN once it has seen token 7."""
    return changed(random_bundle(), "token_embedding.weight", lambda weight: weight[7].fill(3e38))


def test_logits_that_are_not_finite_are_an_error_of_that_request_and_the_engine_goes_on(
    spoilt: ModelBundle,
) -> None:
    healthy = tuple(i for i in random_ids(13, 30) if i != 7)
    with engine(spoilt) as live:
        before = ask_one(live, healthy, 2)
        answer = ask_one(live, (1, 7, 2), 4, temperature=1.0)
        assert (answer.finish, answer.token_ids) == ("error", ())
        assert answer.error is not None
        assert "not finite" in answer.error
        assert ask_one(live, healthy, 2) == before
        assert live.stats().requests_finished == {"length": 2, "error": 1}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_infinite_logit_is_an_error_even_if_it_is_the_lowest(temperature: float) -> None:
    bundle = changed(random_bundle(), "final_norm.scale", lambda scale: scale.fill(0))
    bundle = changed(bundle, "final_norm.bias", lambda bias: bias.fill(1))
    bundle = changed(bundle, "language_model_head.bias", lambda bias: bias[3:4].fill(-3e38))
    with engine(bundle) as live:
        assert ask_one(live, (9,), 1, temperature=temperature).finish == "length"
    bundle = changed(bundle, "language_model_head.weight", lambda weight: weight[3].fill(-1e37))
    with engine(bundle) as live:
        answer = ask_one(live, (9,), 1, temperature=temperature)
    assert (answer.finish, answer.token_ids) == ("error", ())


def test_an_error_of_one_request_is_not_its_neighbours(spoilt: ModelBundle) -> None:
    """Neither the model's, nor that of settings with which no number is left."""
    healthy = tuple(i for i in random_ids(13, 30) if i != 7)
    wanted = [GenerationRequest(healthy[:20], 30, top_logprobs=2), GenerationRequest(healthy, 30)]
    others = [
        GenerationRequest((1, 7, 2), 9),
        GenerationRequest(healthy, 9, SamplingParams(repetition_penalty=3e-308)),
        GenerationRequest(healthy, 9, SamplingParams(presence_penalty=-1.7e308, frequency_penalty=-1.7e308)),
    ]
    with engine(spoilt) as live:
        expected = ask(live, wanted)
        answers = ask(live, [wanted[0], *others, wanted[1]], at_once=6)
    assert [answers[0], answers[-1]] == expected
    for (answer,) in answers[1:-1]:
        assert answer.finish == "error"
        assert answer.error


def test_without_native_code_rows_are_computed_alone_only_if_that_was_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows: list[int] = []
    real = DecodeStep.__call__

    def counting(step: DecodeStep, token_ids: torch.Tensor, *rest: object) -> torch.Tensor:
        rows.append(len(token_ids))
        return real(step, token_ids, *rest)  # type: ignore[arg-type]

    answers = []
    for mode in ("deterministic", "fast"):
        with dispatch.use("torch"):
            service = ModelService(random_bundle(), ServingConfig(backend="cpu", mode=mode))
        with monkeypatch.context() as patched, service:
            patched.setattr(DecodeStep, "__call__", counting)
            answers.append(ask_one(service.engine, random_ids(14, 20), 4).token_ids)
        assert service.config.mode == mode
        assert max(rows) == (1 if mode == "deterministic" else 20)
        rows.clear()
    assert answers[0] == answers[1]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("context", [1, 2, 3, 64])
def test_the_self_test_says_that_rows_do_not_depend_on_company(context: int, native: bool) -> None:
    with dispatch.use("native" if native else "torch"):
        assert ModelRunner(random_bundle(context), page_count=32, page_size=16).is_batch_invariant()


def test_the_self_test_notices_rows_that_depend_on_company(monkeypatch: pytest.MonkeyPatch) -> None:
    real = DecodeStep.__call__

    def dependent(step: DecodeStep, token_ids: torch.Tensor, *rest: object) -> torch.Tensor:
        return real(step, token_ids, *rest) + 1e-6 * (len(token_ids) > 1)  # type: ignore[arg-type]

    monkeypatch.setattr(DecodeStep, "__call__", dependent)
    service = ModelService(random_bundle(), ServingConfig(backend="cpu"))
    with service:
        assert service.health()["batch_invariant"] is False
