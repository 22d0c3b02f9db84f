"""Tokens that need not be computed again, shared prefixes, and those that must be, full contexts."""

import random
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from statistics import median
from typing import Any

from artifacts import ModelBundle
from benchmarks.harness import Row, row
from benchmarks.serving_peers.work import CONTEXT, VOCABULARY
from riftco import ModelRuntime
from riftco.config import ServingConfig
from riftco.serving import DecodeSession, ModelService
from riftco.serving.engine import Event, GenerationRequest, Usage

REQUESTS, PROMPT, SHARED = 50, 192, 144


def prefix_rows(bundle: ModelBundle, threads: int) -> Iterator[Row]:
    """Fifty prompts in turn whose first three quarters are the same: with the cache and without."""
    source = random.Random(0)
    shared = _ids(source, SHARED)
    prompts = [shared + _ids(source, PROMPT - SHARED) for _ in range(REQUESTS)]
    seconds: dict[bool, list[float]] = {True: [], False: []}
    usages = []
    with _service(bundle, threads, prefix_cache=True) as cached, _service(bundle, threads) as plain:
        for service in (cached, plain):
            _generate(service, _ids(source, PROMPT), 2)
        for prompt in prompts:
            for service in (cached, plain):
                taken, usage = _timed(lambda service=service, prompt=prompt: _generate(service, prompt, 1))
                seconds[service is cached].append(taken)
                if service is cached:
                    usages.append(usage)
    share = sum(usage.cached_tokens for usage in usages) / (REQUESTS * PROMPT)
    title = "prompts of 192 tokens, 75 % shared, 50 requests"
    yield row(f"{title}: tokens from the cache", 100 * share, "%", "must be", 70.0, 1.0)
    with_cache, without = (1000 * median(seconds[kind][1:]) for kind in (True, False))
    yield row(f"{title}: first token", with_cache, "ms", "our own without the cache", without, 3.0)


def rollover_rows(bundle: ModelBundle, threads: int, quick: bool) -> Iterator[Row]:
    """Each token beyond a full context needs the whole window anew: in one forward, or token by token."""
    source, new = random.Random(1), 4 if quick else 16
    window = _ids(source, CONTEXT)
    turns: list[tuple[float, float, float]] = []
    with _service(bundle, threads) as service, ModelRuntime.open(bundle) as runtime:
        for _ in range(2 if quick else 5):
            first, _ = _timed(lambda: _generate(service, window, 1))
            more, _ = _timed(lambda: _generate(service, window, 1 + new))
            one_by_one, _ = _timed(lambda: _step_through(runtime, window))
            turns.append((more - first, one_by_one, first))
    ours = min(more for more, _, _ in turns) / new
    peer = min(one_by_one for _, one_by_one, _ in turns)
    title = f"a token beyond the context of {CONTEXT}, slide"
    yield row(title, 1000 * ours, "ms", "replay token by token (DecodeSession)", 1000 * peer, 15.0)


def _step_through(runtime: ModelRuntime, window: tuple[int, ...]) -> None:
    with DecodeSession(runtime.model) as session:
        for token in window:
            session.step(token)


def _service(bundle: ModelBundle, threads: int, prefix_cache: bool = False) -> ModelService:
    settings: Any = {"mode": "fast", "threads": threads, "prefix_cache": prefix_cache}
    return ModelService(bundle, ServingConfig(backend="cpu", **settings))


def _generate(service: ModelService, prompt: tuple[int, ...], new: int) -> Usage:
    events: SimpleQueue[Event] = SimpleQueue()
    service.engine.submit(GenerationRequest(prompt, max_new_tokens=new), events.put)
    while True:
        event = events.get()
        if event.finish is not None:
            assert event.usage is not None, event.error
            return event.usage


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    found = call()
    return time.perf_counter() - begin, found


def _ids(source: random.Random, count: int) -> tuple[int, ...]:
    return tuple(source.randrange(VOCABULARY) for _ in range(count))
