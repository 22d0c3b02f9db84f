"""What the tests of the HTTP service share: a bundle that can chat, an engine that stands still, figures."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from threading import Event
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from artifacts import ModelBundle, ModelConfig
from riftco import capture_bundle
from riftco.model import DecoderOnlyTransformer
from riftco.serving import ModelService
from riftco.tokenizer import Tokenizer
from tests.riftco.serving.http.wire import exchange

SAMPLED = {"temperature": 1.0, "seed": 7}


@cache
def any_text_bundle(context: int = 96, random_seed: int = 3) -> ModelBundle:
    """Random weights over all bytes that UTF-8 has: whatever a client writes can be encoded, a chat fits."""
    tokenizer = Tokenizer(bytes(range(255)))  # 255 would be the end of text
    config = ModelConfig(255, context, 16, 2, 2, 24, random_seed=random_seed)
    return capture_bundle(DecoderOnlyTransformer(config), tokenizer, stage="pretraining")


class Hold:
    """Whether the engine stands still, and has come to a step in which it does."""

    def __init__(self) -> None:
        self.reached, self.end = Event(), Event()


@contextmanager
def held_engine(service: ModelService) -> Iterator[Hold]:
    """An engine that stops in its next step until the block, or `end` being set, lets it go on."""
    hold, runner = Hold(), service.engine._runner
    run = runner.run

    def held(plan: Any) -> Any:
        hold.reached.set()
        assert hold.end.wait(60)
        return run(plan)

    runner.run = held  # type: ignore[method-assign]
    try:
        yield hold
    finally:
        hold.end.set()
        runner.run = run  # type: ignore[method-assign]


def fail_from_step(
    number: int, service: ModelService, monkeypatch: pytest.MonkeyPatch, once: Event | None = None
) -> None:
    """Let the steps of an engine fail after so many that succeed, but not before `once` is set."""
    run, steps = service.engine._runner.run, count()

    def failing(plan: Any) -> Any:
        if next(steps) >= number:
            assert once is None or once.wait(60)
            raise RuntimeError("secret")
        return run(plan)

    monkeypatch.setattr(service.engine._runner, "run", failing)


def leave(connection: socket.socket) -> None:
    """Close a connection with a reset, which the server sees at once."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()


def get(path: str, **headers: str) -> bytes:
    """A GET request as bytes."""
    lines = [f"GET {path} HTTP/1.1", "Host: localhost", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


def figures(url: str, **headers: str) -> dict[str, float]:
    """Samples of `/metrics`, summed over their labels, by name without the prefix."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(exchange(url, get("/metrics", **headers)).body.decode()):
        for sample in family.samples:
            name = sample.name.removeprefix("riftco:")
            if not name.endswith("_bucket"):
                sums[name] = sums.get(name, 0) + sample.value
    return sums
