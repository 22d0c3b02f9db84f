"""Several models in one process: loaded when asked for, unloaded for room, never while in use."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from riftco.config import ServingConfig
from riftco.serving import ModelService, background_server
from riftco.serving.engine import GenerationRequest
from riftco.serving.http.request_policy import RefusedError
from riftco.serving.http.shelf import Shelf, serving_bytes
from tests.riftco.serving.http.support import any_text_bundle, figures, get, held_engine
from tests.riftco.serving.http.wire import exchange, post, wait_until

CONFIG = ServingConfig(backend="cpu", maximum_running=2)
BUNDLES = {name: any_text_bundle(32, seed) for seed, name in enumerate("abc")}
SIZE = serving_bytes(BUNDLES["a"], CONFIG)


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    """Room for two of three."""
    with Shelf(BUNDLES, CONFIG, memory_bytes=2 * SIZE) as shelf:
        yield shelf


def use(shelf: Shelf, name: str | None = None) -> ModelService:
    service = shelf.acquire(name)
    shelf.release(name)
    return service


def loaded(shelf: Shelf) -> str:
    return "".join(name for name in shelf.names if shelf.loaded(name) is not None)


def test_a_model_is_loaded_when_it_is_asked_for(shelf: Shelf) -> None:
    assert loaded(shelf) == ""
    assert use(shelf).artifact_id == BUNDLES["a"].artifact_id
    assert use(shelf, "b").artifact_id == BUNDLES["b"].artifact_id
    assert loaded(shelf) == "ab"
    assert use(shelf, "a") is use(shelf)


def test_the_least_recently_used_one_makes_room(shelf: Shelf) -> None:
    first = [use(shelf, name) for name in "aba"]
    use(shelf, "c")
    assert loaded(shelf) == "ac"
    assert first[1].engine.closed
    assert not first[0].engine.closed
    assert use(shelf, "b") is not first[1]
    assert loaded(shelf) == "bc"


def test_one_in_use_is_never_unloaded(shelf: Shelf) -> None:
    held = shelf.acquire("a")
    use(shelf, "b")
    use(shelf, "c")
    assert loaded(shelf) == "ac"
    shelf.acquire("c")
    with pytest.raises(RefusedError, match="no room to load the model 'b'") as error:
        shelf.acquire("b")
    assert (error.value.refusal.status, error.value.refusal.retry_after) == (503, 5)
    assert held.generate("x", max_new_tokens=1).generated_token_ids
    shelf.release("a")
    assert use(shelf, "b")
    assert loaded(shelf) == "bc"


def test_one_that_hangs_is_not_unloaded_and_is_told_of() -> None:
    with Shelf(BUNDLES, CONFIG, memory_bytes=SIZE) as shelf:
        service = use(shelf, "a")
        with held_engine(service) as hold:
            service.engine.submit(GenerationRequest((1,)), lambda _: None)
            assert hold.reached.wait(10)
            service.engine._heartbeat -= CONFIG.stall_seconds
            with ThreadPoolExecutor(1) as threads:
                asked = threads.submit(shelf.acquire, "b")
                try:
                    with pytest.raises(RefusedError, match="no room"):
                        asked.result(2)
                    assert loaded(shelf) == "a"
                    assert service.health()["status"] == "stalled"
                finally:
                    hold.end.set()
        assert wait_until(lambda: service.health()["status"] == "ok")
        use(shelf, "b")
        assert loaded(shelf) == "b"


def test_one_larger_than_the_budget_never_will_be_loaded() -> None:
    with Shelf(BUNDLES, CONFIG, memory_bytes=SIZE - 1) as shelf:
        with pytest.raises(RefusedError, match="more than the") as error:
            shelf.acquire("b")
        assert error.value.refusal.retry_after is None


def test_without_a_budget_all_stay() -> None:
    with Shelf(BUNDLES, CONFIG) as shelf:
        services = [use(shelf, name) for name in "abcabc"]
        assert loaded(shelf) == "abc"
    assert all(service.engine.closed for service in services)
    with pytest.raises(RefusedError, match="closed") as error:
        shelf.acquire()
    refusal = error.value.refusal
    assert (refusal.status, refusal.code, refusal.retry_after) == (503, "closed", 5)


def test_a_given_service_is_never_unloaded_nor_closed() -> None:
    with ModelService(BUNDLES["a"], CONFIG) as service:
        with Shelf.of(service, "mine") as shelf:
            assert use(shelf, "mine") is service
        assert service.health()["status"] == "ok"


def test_many_threads_load_a_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    BUNDLES["a"].save(tmp_path / "a.rift")
    with Shelf({"a": tmp_path / "a.rift"}, CONFIG) as shelf, ThreadPoolExecutor(8) as threads:
        assert len({id(service) for service in threads.map(lambda _: use(shelf), range(32))}) == 1


def test_threads_that_want_all_models_at_once_keep_within_the_budget(shelf: Shelf) -> None:
    def visit(name: str) -> str:
        try:
            service = shelf.acquire(name)
        except RefusedError as error:
            return str(error.refusal.code)
        try:
            assert len(loaded(shelf)) <= 2
            assert service.artifact_id == BUNDLES[name].artifact_id
            return str(len(service.generate("x", max_new_tokens=2).generated_token_ids))
        finally:
            shelf.release(name)

    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(visit, "abc" * 6))
    assert set(answers) <= {"2", "model_not_loaded"}
    assert "2" in answers
    assert all(entry.uses == 0 for entry in shelf._entries.values())


def test_totals_outlive_their_model(shelf: Shelf) -> None:
    for name in "abca":
        use(shelf, name).generate("xy", max_new_tokens=3)
    totals = {name: stats.generated_tokens for name, stats in shelf.statistics().items()}
    assert totals == {"a": 6, "b": 3, "c": 3}
    assert shelf.statistics()["b"].pages == 0


def test_what_a_model_takes_depends_on_how_it_is_served() -> None:
    sizes = [
        serving_bytes(BUNDLES["a"], CONFIG.model_copy(update={"weights": weights}))
        for weights in ("float32", "bfloat16", "int8", "nf4")
    ]
    assert sizes[0] > sizes[1] > sizes[2] > sizes[3]
    linear = sum(
        x.size for name, x in BUNDLES["a"].tensors().items() if x.ndim == 2 and "embedding" not in name
    )
    model = BUNDLES["a"].config
    numbers = 2 * model.block_count * model.model_width * CONFIG.maximum_running * model.maximum_context
    assert sizes[0] - sizes[1] == math.floor(1.9375 * linear) + 2 * numbers  # a float32 scale for 64 weights
    whole = [{"kv_cache_block_size": 1_000}, {"kv_cache": "contiguous"}]
    assert len({serving_bytes(BUNDLES["a"], CONFIG.model_copy(update=change)) for change in whole}) == 1
    more = CONFIG.model_copy(update={"kv_cache_block_count": 100})
    assert serving_bytes(BUNDLES["a"], more) > sizes[0]


def test_requests_name_their_model(shelf: Shelf) -> None:
    use(shelf)
    with background_server(shelf) as url:
        assert exchange(url, get("/ready")).status == 200
        assert [card["id"] for card in exchange(url, get("/v1/models")).json["data"]] == list("abc")
        assert exchange(url, get("/health")).json["models"] == list("abc")
        expected = {}
        for name, bundle in BUNDLES.items():
            answer = exchange(url, post({"prompt": "x", "max_new_tokens": 4, "model": name})).json
            assert answer["artifact_id"] == bundle.artifact_id
            expected[name] = answer["generated_text"]
        for name in "cba":
            body = {"model": name, "prompt": "x", "max_tokens": 4, "temperature": 0}
            answer = exchange(url, post(body, "/v1/completions")).json
            assert (answer["model"], answer["choices"][0]["text"]) == (name, expected[name])
        assert exchange(url, post({"prompt": "x", "model": "d"})).status == 404
        assert exchange(url, post({"prompt": "x", "model": 1})).status == 400
        assert figures(url)["generation_tokens_total"] == 24
        assert len(loaded(shelf)) == 2


def test_a_server_is_ready_with_any_model() -> None:
    with Shelf(BUNDLES, CONFIG, memory_bytes=SIZE) as shelf, background_server(shelf) as url:
        assert exchange(url, get("/ready")).status == 200
        for name in "abc":
            use(shelf, name)
            assert loaded(shelf) == name
            assert exchange(url, get("/ready")).status == 200
        service = use(shelf, "c")
        with held_engine(service) as hold:
            service.engine.submit(GenerationRequest((1,)), lambda _: None)
            assert hold.reached.wait(10)
            service.engine._heartbeat -= CONFIG.stall_seconds
            assert exchange(url, get("/ready")).json["detail"] == "the engine is stalled"


def test_a_model_that_cannot_be_served_takes_nobodys_place() -> None:
    few = CONFIG.model_copy(update={"kv_cache_block_count": 2})  # enough for a context of 32, too few for 96
    bundles = {"small": BUNDLES["a"], "large": any_text_bundle(96)}
    budget = serving_bytes(bundles["large"], few)
    with Shelf(bundles, few, memory_bytes=budget) as shelf, background_server(shelf) as url:
        use(shelf, "small")
        refused = exchange(url, post({"prompt": "x", "model": "large"}))
        assert (refused.status, refused.json["detail"]) == (503, "the model 'large' could not be loaded")
        assert loaded(shelf) == "small"
        assert exchange(url, get("/ready")).status == 200
    with background_server(shelf) as url:
        assert exchange(url, get("/ready")).json["detail"] == "the models are unloaded"


def test_a_file_is_read_again_when_its_model_is_loaded_again(tmp_path: Path) -> None:
    files = {name: BUNDLES[name].save(tmp_path / f"{name}.rift") for name in "ab"}
    with Shelf(files, CONFIG, memory_bytes=SIZE) as shelf:
        answer = use(shelf, "a").generate("x", max_new_tokens=4)
        files["a"].write_bytes(BUNDLES["c"].to_bytes())  # in place, as `cp` does
        assert use(shelf, "a").generate("x", max_new_tokens=4) == answer
        files["a"].write_bytes(b"")
        assert use(shelf, "a").generate("x", max_new_tokens=4) == answer
        files["a"].write_bytes(BUNDLES["c"].to_bytes())
        use(shelf, "b")
        assert use(shelf, "a").artifact_id == BUNDLES["c"].artifact_id


def test_a_model_whose_request_runs_stays_and_its_rival_is_told_to_wait() -> None:
    with Shelf(BUNDLES, CONFIG, memory_bytes=SIZE) as shelf, background_server(shelf) as url:
        service = use(shelf, "a")
        with held_engine(service) as hold, ThreadPoolExecutor(1) as threads:
            running = threads.submit(exchange, url, post({"prompt": "x", "model": "a", "max_new_tokens": 2}))
            assert hold.reached.wait(10)
            refused = exchange(url, post({"prompt": "x", "model": "b"}))
            assert (refused.status, refused.headers["retry-after"]) == (503, "5")
            hold.end.set()
            assert running.result().status == 200
        assert exchange(url, post({"prompt": "x", "model": "b", "max_new_tokens": 1})).status == 200
        assert loaded(shelf) == "b"
