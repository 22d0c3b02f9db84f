"""ModelService: the order of its checks, one generation at a time, health that waits for nobody."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from riftco.config import ServingConfig
from riftco.serving import ModelService
from tests.riftco.serving.models import bundle
from tests.support import fixture

CONFIG = ServingConfig(backend="cpu", maximum_new_tokens=40)


@pytest.fixture(scope="module")
def service() -> ModelService:
    return ModelService(bundle("byte"), CONFIG)


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
    }


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"max_new_tokens": 41, "temperature": -1}, ValueError, "exceeds the serving limit 40"),
        ({"max_new_tokens": True}, TypeError, "max_new_tokens must be an int"),
        ({"temperature": -1, "top_k": 0}, ValueError, "temperature must not be negative"),
        ({"temperature": float("nan")}, ValueError, "temperature must be finite"),
        ({"temperature": False}, TypeError, "temperature must be a real number"),
        ({"top_k": 2}, ValueError, "top_k requires temperature greater than zero"),
        ({"temperature": 1, "top_k": 0, "seed": -1}, ValueError, "top_k must be at least 1"),
        ({"temperature": 1, "seed": -1, "prompt": ""}, ValueError, "seed must be at least 0"),
        ({"prompt": ""}, ValueError, "at least one token"),
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


def test_the_same_seed_gives_the_same_tokens_from_many_threads(service: ModelService) -> None:
    case = fixture("byte.reference.json")["sampled"][0]
    fields = {name: case[name] for name in ("max_new_tokens", "temperature", "top_k", "seed")}
    with ThreadPoolExecutor(4) as threads:
        results = [threads.submit(service.generate, case["prompt"], **fields) for _ in range(8)]
    found = {result.result().generated_token_ids for result in results}
    assert found == {tuple(case["generated_token_ids"])}


def test_health_does_not_wait_for_a_generation_but_closing_does(monkeypatch: pytest.MonkeyPatch) -> None:
    service = ModelService(bundle("byte"), CONFIG)
    entered, finish = Event(), Event()
    generate = service._stack.generate  # type: ignore[union-attr]

    def slow(*arguments: object, **options: object) -> object:
        entered.set()
        finish.wait(10)
        return generate(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(service._stack, "generate", slow)
    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(service.generate, "the ", max_new_tokens=1)
        assert entered.wait(10)
        assert service.health()["status"] == "ok"
        closing = threads.submit(service.close)
        assert not closing.done()
        finish.set()
        assert running.result(10).generated_token_ids == (22,)
        closing.result(10)
    for call in (service.health, lambda: service.generate("the ")):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    service.close()


def test_the_block_closes_the_service() -> None:
    with ModelService(bundle("byte"), CONFIG) as service:
        service.health()
    with pytest.raises(RuntimeError, match="closed"):
        service.health()
