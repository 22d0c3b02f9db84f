"""Request bodies against OpenAI's schema: whatever is wrong with one, saying so costs little."""

import json

import pytest
from pydantic import ValidationError

from riftco.serving.http.openai_requests import parse_request
from riftco.serving.http.openai_schema import ChatRequest, CompletionRequest, Sampling
from riftco.serving.http.request_policy import RefusedError

MANY = 10_000  # mistakes
MESSAGE = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (ChatRequest, {"messages": [{}] * MANY}),
        (ChatRequest, {"messages": [MESSAGE | {"content": [{}] * MANY}]}),
        (ChatRequest, {"messages": [MESSAGE], "stop": [0] * MANY}),
        (ChatRequest, {"messages": [MESSAGE], "tools": [0] * MANY}),
        (CompletionRequest, {"prompt": [-1] * MANY}),
        (CompletionRequest, {"prompt": [[]] * MANY}),
        (CompletionRequest, {"prompt": [""] * MANY}),
        (CompletionRequest, {"prompt": [["a"] * MANY]}),
        (CompletionRequest, {"prompt": [[1], [-1] * MANY]}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_many_mistakes_are_as_cheap_as_one(kind: type[Sampling], changes: dict) -> None:
    with pytest.raises(ValidationError) as error:
        kind.model_validate({"model": "riftco"} | changes)
    assert error.value.error_count() < 20


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"prompt": ["a"] * 17}, "prompt: List should have at most 16 items"),
        ({"prompt": [1, -2]}, "prompt.1: Input should be greater than or equal to 0"),
        ({"prompt": [1, "a"]}, "prompt.1: Input should be a valid integer"),
        ({"prompt": ["a", ""]}, "prompt.1: String should have at least 1 character"),
        ({"prompt": ["a", 5]}, "prompt.1: Input should be a valid string"),
        ({"prompt": []}, "prompt: List should have at least 1 item"),
        ({"prompt": [[1], []]}, "prompt.1: List should have at least 1 item"),
        ({"prompt": [["a"]]}, "prompt.0.0: Input should be a valid integer"),
        ({"prompt": "a", "stop": ["a"] * 5}, "stop: List should have at most 4 items"),
        ({"prompt": "a", "stop": ["a", ""]}, "stop.1: String should have at least 1 character"),
        ({"prompt": "a", "stop": 5, "n": 0}, "n: Input should be greater than or equal to 1"),
        ({"messages": [MESSAGE | {"content": [{"type": "image_url"}]}]}, "messages.0.content.0.type: "),
        ({"messages": [MESSAGE | {"content": 5}]}, "messages.0.content: Input should be a valid string"),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_list_is_said_of_its_first_wrong_element(changes: dict, detail: str) -> None:
    kind = ChatRequest if "messages" in changes else CompletionRequest
    with pytest.raises(RefusedError) as error:
        parse_request(json.dumps({"model": "riftco"} | changes).encode(), kind)
    assert error.value.refusal.detail.startswith(detail)
