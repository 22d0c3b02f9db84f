"""ModelService: recorded tokens under any load, the order of its checks, health that waits for nobody."""

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from time import sleep
from typing import Any

import numpy as np
import pytest

from artifacts import ModelBundle, ModelConfig, TokenizerSpec
from kernels import DecodeStep
from riftco.config import ServingConfig
from riftco.serving import ModelService, TemperatureSampler, TextGenerator
from riftco.serving.engine import GenerationRequest, SamplingParams, generate, runner
from riftco.serving.service import page_layout
from tests.riftco.serving.models import BUNDLES, bundle, runtime
from tests.support import fixture

CONFIG = ServingConfig(backend="cpu", maximum_new_tokens=40)


@pytest.fixture(scope="module")
def service() -> Iterator[ModelService]:
    with ModelService(bundle("byte"), CONFIG) as opened:
        yield opened


def test_health_says_what_is_served(service: ModelService) -> None:
    assert service.health() == {
        "status": "ok",
        "artifact_id": bundle("byte").artifact_id,
        "artifact_stage": "pretraining",
        "backend": "cpu",
        "vocabulary_size": 29,
        "maximum_context": 12,
        "maximum_new_tokens": 40,
        "kv_cache": "paged",
        "kv_cache_block_size": 16,
        "mode": "deterministic",
        "weights": "float32",
        "batch_invariant": True,
        "template": "PlainChatFormatter",
    }


@pytest.mark.parametrize("name", BUNDLES)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kv_cache": "contiguous", "prefix_cache": False},
        {"kv_cache_block_size": 5, "step_tokens": 4, "maximum_running": 4, "kv_cache_block_count": 20},
        {"kv_cache_block_size": 1000, "mode": "fast"},
    ],
)
def test_recorded_generations_one_by_one_and_all_at_once(name: str, settings: dict[str, Any]) -> None:
    cases = fixture(f"{name}.reference.json")
    with ModelService(bundle(name), CONFIG.model_copy(update=settings)) as service:

        def check(case: dict[str, Any]) -> None:
            fields = {
                key: case[key] for key in ("max_new_tokens", "temperature", "top_k", "seed") if key in case
            }
            result = service.generate(case["prompt"], **fields)
            assert list(result.generated_token_ids) == case["generated_token_ids"]
            assert result.raw_bytes == base64.b64decode(case["raw_bytes_base64"])
            assert result.text == case["text"]

        everything = cases["greedy"] + cases["sampled"]
        for case in everything:
            check(case)
        with ThreadPoolExecutor(len(everything)) as threads:
            for checked in [threads.submit(check, case) for case in everything * 2]:
                checked.result()


def test_events_are_what_the_one_shot_answer_is_made_of(service: ModelService) -> None:
    for case in fixture("byte.reference.json")["sampled"]:
        sampling = SamplingParams(case["temperature"], case["top_k"], seed=case["seed"])
        prompt_ids = service.prompt_ids(case["prompt"])
        request = GenerationRequest(prompt_ids, case["max_new_tokens"], sampling)
        events = list(generate(service.engine, request))
        assert [i for event in events for i in event.token_ids] == case["generated_token_ids"]
        assert case["prompt"] + "".join(event.text for event in events) == case["text"]
        assert [event.finish for event in events] == [None] * (len(events) - 1) + ["length"]


def test_a_seed_gives_the_tokens_of_the_text_generator(service: ModelService) -> None:
    """For any seed, also beyond the context, where it replays its newest tokens."""
    live = runtime("byte")
    seeds = [*range(22), 2**63, 2**64 - 1]
    with ThreadPoolExecutor(8) as threads:
        results = list(
            threads.map(
                lambda seed: service.generate(
                    "the ", max_new_tokens=20, temperature=1.2, top_k=None if seed % 2 else 20, seed=seed
                ),
                seeds,
            )
        )
    for seed, found in zip(seeds, results, strict=True):
        sampler = TemperatureSampler(1.2, top_k=None if seed % 2 else 20, seed=seed)
        assert found == TextGenerator(live.model, live.tokenizer, sampler).generate("the ", 20)
    assert len({result.generated_token_ids for result in results}) > 20


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"max_new_tokens": 41, "temperature": -1}, ValueError, "exceeds the serving limit 40"),
        ({"max_new_tokens": -1, "temperature": -1}, ValueError, "must not be negative"),
        ({"max_new_tokens": True}, TypeError, "max_new_tokens must be an int"),
        ({"max_new_tokens": 0, "temperature": -1}, ValueError, "temperature must not be negative"),
        ({"temperature": -1, "top_k": 0}, ValueError, "temperature must not be negative"),
        ({"temperature": float("nan")}, ValueError, "temperature must be finite"),
        ({"temperature": 10**400}, ValueError, "temperature must be finite"),
        ({"temperature": False}, TypeError, "temperature must be a real number"),
        ({"temperature": "1"}, TypeError, "temperature must be a real number"),
        ({"top_k": 2}, ValueError, "top_k requires temperature greater than zero"),
        ({"temperature": 1, "top_k": 0, "seed": -1}, ValueError, "top_k must be at least 1"),
        ({"temperature": 1, "top_k": True}, TypeError, "top_k must be an integer"),
        ({"temperature": 1, "top_k": 30}, ValueError, "top_k must not exceed"),
        ({"temperature": 1, "seed": -1, "prompt": ""}, ValueError, "seed must be at least 0"),
        ({"temperature": 1, "seed": 2**64}, ValueError, r"seed must be at most 2\*\*64 - 1"),
        ({"temperature": 1, "seed": 1.0}, TypeError, "seed must be an integer"),
        ({"prompt": ""}, ValueError, "at least one token"),
        ({"prompt": b"the"}, TypeError, "prompt must be a string"),
        ({"prompt": "\N{GREEK CAPITAL LETTER OMEGA}"}, ValueError, "byte"),
        ({"prompt": "", "max_new_tokens": 0}, ValueError, "at least one token"),
    ],
)
def test_the_first_wrong_field_is_named(
    service: ModelService, fields: dict, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        service.generate(**{"prompt": "the ", **fields})


def test_greedy_does_not_look_at_the_seed(service: ModelService) -> None:
    result = service.generate("the ", max_new_tokens=3, temperature=0, seed=-5)
    assert result.generated_token_ids == (22, 10, 6)


def test_no_new_tokens_are_answered_without_the_engine(service: ModelService) -> None:
    steps = service.engine.stats().steps
    assert service.generate("the ", max_new_tokens=0).text == "the "
    assert service.generate("the ", max_new_tokens=0, temperature=1, top_k=10_000).generated_token_ids == ()
    assert service.engine.stats().steps == steps


class Gate:
    """Holds the engine in its first step until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.opened = Event(), Event()
        real = runner.ModelRunner.run

        def slow(*arguments: Any) -> Any:
            self.entered.set()
            assert self.opened.wait(30)
            return real(*arguments)

        monkeypatch.setattr(runner.ModelRunner, "run", slow)


def test_health_does_not_wait_for_a_generation_but_closing_does(monkeypatch: pytest.MonkeyPatch) -> None:
    service, gate = ModelService(bundle("byte"), CONFIG), Gate(monkeypatch)
    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(service.generate, "the ", max_new_tokens=1)
        assert gate.entered.wait(30)
        assert service.health()["status"] == "ok"
        closing = threads.submit(service.close)
        assert not closing.done()
        gate.opened.set()
        assert running.result(30).generated_token_ids == (22,)
        closing.result(30)
    for call in (
        service.health,
        lambda: service.generate("the "),
        lambda: service.generate("the ", max_new_tokens=0),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    service.close()


def test_health_says_that_steps_have_stopped_and_when_they_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIG.model_copy(update={"stall_seconds": 0.8})
    with ModelService(bundle("byte"), config) as service, ThreadPoolExecutor(1) as threads:
        gate = Gate(monkeypatch)
        running = threads.submit(service.generate, "the ", max_new_tokens=1)
        assert gate.entered.wait(30)
        while service.health()["status"] != "stalled":
            assert not running.done()
            sleep(0.01)
        gate.opened.set()
        running.result(30)
        while service.health()["status"] != "ok":
            sleep(0.01)


def test_a_generation_that_takes_too_long_is_an_error() -> None:
    with ModelService(bundle("byte"), CONFIG.model_copy(update={"request_seconds": 1e-9})) as service:
        with pytest.raises(RuntimeError, match="ended: timeout"):
            service.generate("the ")
        assert service.engine.stats().requests_finished == {"timeout": 1}


def test_the_block_closes_the_service() -> None:
    with ModelService(bundle("byte"), CONFIG) as service:
        service.health()
    with pytest.raises(RuntimeError, match="closed"):
        service.health()


def test_the_end_of_text_token_ends_an_answer_and_is_no_part_of_it() -> None:
    config = ModelConfig(3, 8, 4, 2, 1, 4)
    weights = {spec.name: np.zeros(spec.shape, np.float32) for spec in config.parameter_specs()}
    weights["language_model_head.bias"][:] = 0, 1, 2  # the last, byte 255, is the end of text
    flat = np.concatenate([values.ravel() for values in weights.values()])
    tokenizer = TokenizerSpec("byte", (97, 98, 255))
    model = ModelBundle(config, tokenizer, config.parameter_specs(), flat, stage="pretraining")
    with ModelService(model, CONFIG) as service:
        assert service.generate("ab").generated_token_ids == ()
        (event,) = generate(service.engine, GenerationRequest((0, 1)))
        assert (event.token_ids, event.text, event.finish) == ((), "", "stop")


def test_settings_reach_the_runner_and_the_scheduler() -> None:
    """Where the answers cannot show it: more steps with smaller ones, nothing cached without a cache."""
    found = []
    for settings in ({}, {"prefix_cache": False}, {"step_tokens": 4, "maximum_running": 1}):
        config = CONFIG.model_copy(update={"kv_cache_block_size": 2, **settings})
        with ModelService(bundle("byte"), config) as service:
            for _ in range(2):
                service.generate("the other ", max_new_tokens=1)
            stats = service.engine.stats()
            found.append((stats.steps, stats.cached_tokens))
    assert found == [(2, 9), (2, 0), (4, 9)]


def test_threads_reach_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    real = DecodeStep.__call__
    monkeypatch.setattr(DecodeStep, "__call__", lambda *rows: given.append(rows[-1]) or real(*rows))
    with ModelService(bundle("byte"), CONFIG.model_copy(update={"threads": 3})) as service:
        service.generate("the ", max_new_tokens=1)
    assert set(given) == {3}


@pytest.mark.parametrize("weights", ["bfloat16", "int8", "nf4"])
def test_rounded_weights_are_served_and_said_to_be(weights: str) -> None:
    case = fixture("bpe.reference.json")["greedy"][0]
    prompt_ids = tuple(case["prompt_token_ids"])
    request = GenerationRequest(prompt_ids, 1, top_logprobs=5)
    events = []
    for kind in ("float32", weights):
        with ModelService(bundle("bpe"), CONFIG.model_copy(update={"weights": kind})) as service:
            assert service.health()["weights"] == kind
            events += generate(service.engine, request)
    assert events[0].logprobs != events[1].logprobs
    assert events[0].logprobs[0].logprob == pytest.approx(events[1].logprobs[0].logprob, abs=0.5)


def test_a_bundle_tuned_with_an_unknown_template_generates_but_cannot_chat() -> None:
    whole = bundle("byte")
    foreign = ModelBundle(
        whole.config,
        whole.tokenizer,
        whole.parameters,
        whole.weights,
        stage="post-training",
        metadata={"formatter": "AlpacaFormatter"},
    )
    with ModelService(foreign, CONFIG) as service:
        assert service.generate("the ", max_new_tokens=1).generated_token_ids == (22,)
        assert service.health()["template"] == "AlpacaFormatter"
        with pytest.raises(ValueError, match="AlpacaFormatter"):
            service.template  # noqa: B018 # an attribute that may fail


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_cache_block_size": 4, "kv_cache_block_count": 2}, "2 pages of 4 tokens cannot hold"),
        ({"kv_cache_block_size": 4, "kv_cache_block_count": 3}, None),
        ({"kv_cache": "contiguous", "kv_cache_block_count": 1}, None),
    ],
)
def test_pages_must_hold_one_context_at_least(settings: dict[str, Any], message: str | None) -> None:
    config = CONFIG.model_copy(update=settings)
    if message:
        with pytest.raises(ValueError, match=message):
            ModelService(bundle("byte"), config)
    else:
        with ModelService(bundle("byte"), config) as service:
            assert service.generate("the ", max_new_tokens=3).generated_token_ids == (22, 10, 6)


@pytest.mark.parametrize(
    ("settings", "layout"),
    [
        ({}, (16, 4 * 32)),
        ({"kv_cache_block_size": 10**9}, (50, 32)),
        ({"kv_cache": "contiguous"}, (50, 32)),
        ({"kv_cache_block_count": 7}, (16, 7)),
        ({"kv_cache_block_size": 1, "maximum_running": 2}, (1, 100)),
    ],
)
def test_pages_hold_the_contexts_of_all_that_run_and_none_is_longer(settings: dict, layout: tuple) -> None:
    assert page_layout(ServingConfig(**settings), 50) == layout
