"""`/metrics`: the names, and the laws that its figures must obey whatever happened."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from riftco.config import ServingConfig
from riftco.serving import ModelService, background_server
from tests.riftco.serving.http.support import any_text_bundle, figures, get, held_engine
from tests.riftco.serving.http.wire import connect, exchange, post, read_answer, read_stream, wait_until

CONFIG = ServingConfig(backend="cpu", maximum_new_tokens=40, maximum_running=3, maximum_waiting=200)
NAMES = {
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
    *("prompt_tokens_total", "generation_tokens_total", "request_success_total", "num_preemptions_total"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total"),
    *(
        f"{name}_{part}"
        for name in (
            *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
            *("request_prompt_tokens", "request_generation_tokens", "request_params_n"),
            "request_params_max_tokens",
        )
        for part in ("count", "sum")
    ),
}


@pytest.fixture
def service() -> Iterator[ModelService]:
    with ModelService(any_text_bundle(48), CONFIG) as service:
        yield service


@pytest.fixture
def url(service: ModelService) -> Iterator[str]:
    with background_server(service) as url:
        yield url


def test_the_names_are_vllm_s(url: str) -> None:
    exchange(url, post({"prompt": "a", "max_new_tokens": 2}))
    found = figures(url)
    assert found.keys() >= NAMES
    assert found["time_to_first_token_seconds_count"] == found["inter_token_latency_seconds_count"] == 1
    answer = exchange(url, get("/metrics"))
    assert answer.headers["content-type"].startswith("text/plain")
    assert b'riftco:generation_tokens_total{model_name="riftco"} 2.0' in answer.body


def test_what_runs_and_waits_is_counted_now(url: str, service: ModelService) -> None:
    assert figures(url)["num_requests_running"] == 0
    with held_engine(service) as hold, connect(url) as connection, connection.makefile("rb") as stream:
        body = {"model": "riftco", "prompt": "a", "n": 5, "max_tokens": 3, "stream": True}
        connection.sendall(post(body, "/v1/completions"))
        assert hold.reached.wait(10)
        hold.reached.clear()
        hold.end.set()
        events = read_stream(stream)
    assert len([event for event in events if event["choices"][0]["finish_reason"]]) == 5
    found = figures(url)
    assert (found["num_requests_running"], found["num_requests_waiting"]) == (0, 0)
    assert (found["request_params_n_sum"], found["request_params_n_count"]) == (5, 1)


def test_what_was_refused_was_no_request() -> None:
    config = CONFIG.model_copy(update={"maximum_running": 1, "maximum_waiting": 1})
    body = {"model": "riftco", "prompt": "a", "n": 2, "max_tokens": 3}
    with ModelService(any_text_bundle(48), config) as service, background_server(service) as url:
        with held_engine(service) as hold, connect(url) as connection, connection.makefile("rb") as stream:
            connection.sendall(post(body, "/v1/completions"))
            assert hold.reached.wait(10)
            assert exchange(url, post(body, "/v1/completions")).status == 429
            hold.end.set()
            assert read_answer(stream).status == 200
        found = figures(url)
    assert (found["request_params_n_sum"], found["request_params_n_count"]) == (2, 1)
    assert found["request_params_max_tokens_count"] == 1


def ask_at_random(url: str, rng: random.Random) -> tuple[int, bool]:
    """One request of any kind: how many choices it asked for, and whether it was admitted."""
    body: dict[str, Any] = {
        "model": "riftco",
        "prompt": "".join(rng.choices("ab", k=rng.randint(1, 60))),
        "max_tokens": rng.randint(1, 12),
        "n": rng.choice([1, 1, 2, 3]),
        "stream": rng.random() < 0.5,
        "stop": rng.choice([None, "a", "\x00"]),
    }
    request = post(body, "/v1/completions")
    if body["stream"] and len(body["prompt"]) < 48:
        with connect(url) as connection, connection.makefile("rb") as stream:
            connection.sendall(request)
            if rng.random() < 0.5:
                read_stream(stream)
            else:
                assert stream.readline().startswith(b"HTTP/1.1 200")  # then leave
        return body["n"], True
    return body["n"], exchange(url, request).status == 200


def test_the_laws_of_conservation(url: str, service: ModelService) -> None:
    rng = random.Random(5)
    asked = [ask_at_random(url, rng) for _ in range(40)]
    choices = sum(n for n, admitted in asked if admitted)
    assert 0 < sum(admitted for _, admitted in asked) < 40
    assert wait_until(lambda: figures(url)["request_success_total"] == choices)
    found = figures(url)
    idle = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "engine_violations_total")
    assert [found[name] for name in idle] == [0, 0, 0, 0]
    assert found["e2e_request_latency_seconds_count"] == choices
    assert found["request_prompt_tokens_count"] == found["request_generation_tokens_count"] == choices
    assert found["request_prompt_tokens_sum"] == found["prompt_tokens_total"]
    assert found["request_generation_tokens_sum"] == found["generation_tokens_total"]
    tokens = found["time_to_first_token_seconds_count"] + found["inter_token_latency_seconds_count"]
    assert tokens == found["generation_tokens_total"]
    assert found["request_params_n_sum"] == choices
    assert found["prefix_cache_hits_total"] <= found["prefix_cache_queries_total"]
    assert found["prompt_tokens_total"] == found["prefix_cache_queries_total"]
    stats = service.engine.stats()
    assert found["generation_tokens_total"] == stats.generated_tokens
    lines = exchange(url, get("/metrics")).body.decode().splitlines()
    posted = 'riftco:http_responses_total{path="/v1/completions"'
    assert sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(posted)) == 40


def test_unknown_paths_are_one_path(url: str) -> None:
    for number in range(5):
        assert exchange(url, get(f"/nowhere/{number}")).status == 404
    text = exchange(url, get("/metrics")).body.decode()
    assert 'riftco:http_responses_total{path="other",status="404"} 5.0' in text
    assert "nowhere" not in text
