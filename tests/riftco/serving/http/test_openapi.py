"""The OpenAPI document holds: requests generated from it are answered as it says."""

from collections.abc import Iterator
from typing import Any

import pytest

from riftco.config import ServingConfig
from riftco.serving import ModelService, background_server
from tests.riftco.serving.http.support import any_text_bundle, get
from tests.riftco.serving.http.wire import exchange

CONFIG = ServingConfig(backend="cpu", maximum_new_tokens=4)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ModelService(any_text_bundle(256), CONFIG) as service, background_server(service) as url:
        yield url


def test_the_document_says_what_the_configuration_allows(url: str) -> None:
    document = exchange(url, get("/openapi.json")).json
    request = document["components"]["schemas"]["CompletionRequest"]
    assert request["properties"]["max_tokens"]["anyOf"][0]["maximum"] == 4
    assert request["properties"]["model"]["enum"] == ["riftco"]
    assert request["additionalProperties"] is False
    assert document["paths"].keys() == {
        *("/v1/models", "/v1/models/{model}", "/v1/completions", "/v1/chat/completions")
    }


# What no schema can say: which texts fit the context, which settings need each other, which ids exist.
REFUSALS = {"context_length_exceeded", "invalid_value", "model_not_found"}


def meets_schema(case: Any, response: Any) -> None:
    """All of schemathesis's checks, except that a body may be refused for what no schema can say."""
    from schemathesis.checks import CHECKS, load_all_checks

    load_all_checks()
    checks = CHECKS.get_all()
    if response.status_code in (400, 404) and response.json()["error"]["code"] in REFUSALS:
        checks = [check for check in checks if check.__name__ != "positive_data_acceptance"]
    case.validate_response(response, checks=checks)


@pytest.mark.parametrize("count", [60, pytest.param(1_000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("positive", [True, False])
def test_generated_requests_are_answered_as_the_document_says(url: str, count: int, positive: bool) -> None:
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    from hypothesis import HealthCheck, given, settings, strategies

    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    mode = schemathesis.GenerationMode.POSITIVE if positive else schemathesis.GenerationMode.NEGATIVE
    operations = [result.ok() for result in schema.get_all_operations()]
    cases = strategies.one_of([operation.as_strategy(generation_mode=mode) for operation in operations])
    seen = set()

    @settings(max_examples=count, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=cases)
    def ask(case: Any) -> None:
        response = case.call()
        seen.add((case.operation.path, response.status_code))
        meets_schema(case, response)

    ask()
    expected = 200 if positive else 400
    assert seen >= {(path, expected) for path in ("/v1/completions", "/v1/chat/completions")}
