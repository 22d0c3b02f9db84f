"""Request bodies against OpenAI's schema: whatever is wrong with one, saying so costs little."""

import pytest
from pydantic import ValidationError

from riftco.serving.http.openai_schema import ChatRequest, CompletionRequest, Sampling

MANY = 10_000
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
