"""Small random models behind a real engine, and its answers as plain values to compare."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from threading import Semaphore
from typing import Any

import numpy as np
import torch

from artifacts import ModelBundle, ModelConfig, TokenizerSpec
from riftco import ModelRuntime
from riftco.config import ServingConfig
from riftco.serving import ModelService
from riftco.serving.engine import Engine, Event, GenerationRequest, SamplingParams, TokenLogprob, Usage

VOCABULARY = 80
_PATIENCE = 1800  # seconds for an answer; the longest soak takes minutes


@cache
def random_bundle(
    context: int = 64, *, width: int = 32, layers: int = 3, vocabulary: int = VOCABULARY
) -> ModelBundle:
    """A model whose every tensor is random and large enough for tokens, positions and order to matter."""
    config = ModelConfig(vocabulary, context, width, 4, layers, 2 * width)
    random = np.random.default_rng(context)
    tensors = {spec.name: random.normal(0, 0.5, spec.shape) for spec in config.parameter_specs()}
    return bundle_of(config, tensors)


def bundle_of(config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> ModelBundle:
    """A bundle of these tensors, over printable bytes from the space on."""
    specs = config.parameter_specs()
    weights = np.concatenate([tensors[spec.name].ravel() for spec in specs]).astype(np.float32)
    tokenizer = TokenizerSpec("byte", tuple(range(32, 32 + config.vocabulary_size)))
    return ModelBundle(config, tokenizer, specs, weights, stage="pretraining")


def changed(bundle: ModelBundle, name: str, change: Callable[[np.ndarray], None]) -> ModelBundle:
    """The bundle with one of its tensors changed in place by `change`."""
    tensors = {key: values.copy() for key, values in bundle.tensors().items()}
    change(tensors[name])
    return bundle_of(bundle.config, tensors)


@cache
def random_runtime(context: int = 64) -> ModelRuntime:
    """The live model of `random_bundle`."""
    return ModelRuntime.open(random_bundle(context))


@contextmanager
def engine(bundle: ModelBundle, **settings: Any) -> Iterator[Engine]:
    """An engine as the service composes it."""
    with ModelService(bundle, ServingConfig(backend="cpu", **settings)) as service:
        yield service.engine
    stats = service.engine.stats()
    assert (stats.violations, stats.running, stats.waiting, stats.free_pages) == (0, 0, 0, stats.pages)


@dataclass(slots=True)
class Answer:
    """All that one choice of a request was told; log-probabilities compare bit for bit."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: str | None = None
    usage: Usage | None = field(default=None, compare=False)  # its cached tokens may depend on the load
    error: str | None = None

    def add(self, event: Event) -> None:
        assert self.finish is None, "an event after the last one"
        self.token_ids += event.token_ids
        self.text += event.text
        self.logprobs += event.logprobs
        self.finish, self.usage, self.error = event.finish, event.usage, event.error


def ask(
    engine: Engine,
    requests: Sequence[GenerationRequest],
    *,
    at_once: int = 1,
    listen: Callable[[int, Event], None] = lambda *_: None,
) -> list[list[Answer]]:
    """The choices' answers to each request, of which `at_once` are kept going.

    `listen` is told of each event, and of the index of its request, on the engine's thread.
    """
    answers = [[Answer() for _ in range(request.choices)] for request in requests]
    places = Semaphore(at_once)

    def sink(index: int, left: list[int]) -> Callable[[Event], None]:
        def take(event: Event) -> None:
            answers[index][event.choice].add(event)
            listen(index, event)
            left[0] -= event.finish is not None
            if not left[0]:
                places.release()

        return take

    for index, request in enumerate(requests):
        places.acquire()
        engine.submit(request, sink(index, [request.choices]))
    for _ in range(at_once):
        assert places.acquire(timeout=_PATIENCE), "a request was never answered"
    return answers


def ask_one(engine: Engine, prompt_ids: Sequence[int], count: int, **settings: Any) -> Answer:
    """The answer to a single prompt; sampling settings go by their own names."""
    sampling = {name: settings.pop(name) for name in SamplingParams.__slots__ if name in settings}
    request = GenerationRequest(tuple(prompt_ids), count, SamplingParams(**sampling), **settings)
    return ask(engine, [request])[0][0]


def random_ids(seed: int, count: int) -> tuple[int, ...]:
    """A prompt of `count` random tokens."""
    return tuple(np.random.default_rng(seed).integers(0, VOCABULARY, count).tolist())


@torch.no_grad()
def exact_logits(bundle: ModelBundle, ids: Sequence[int], *, half_pages: bool = False) -> np.ndarray:
    """The oracle in binary64: logits `[T, V]` of a full forward over at most a context of tokens.

    half_pages: keys and values are rounded to bfloat16 as bfloat16 pages round them.
    """
    return _binary64(bundle, half_pages)(list(ids))[0].numpy()


@cache
def _binary64(bundle: ModelBundle, half_pages: bool) -> torch.nn.Module:
    model = ModelRuntime.open(bundle).model.double()
    if half_pages:
        for block in model.blocks:
            for kept in (block.attention.key, block.attention.value):
                kept.register_forward_hook(lambda module, inputs, output: output.bfloat16().double())
    return model
