"""The OpenAI routes, asked by OpenAI's own client, which validates every answer strictly."""

import json
from collections.abc import Iterator
from threading import Event
from typing import Any

import pytest

from riftco.config import ServingConfig
from riftco.serving import ModelService, background_server
from riftco.serving.http.openai_schema import Completion
from tests.riftco.serving.http.support import SAMPLED, any_text_bundle, fail_from_step, held_engine
from tests.riftco.serving.http.wire import connect, exchange, post, wait_until

openai = pytest.importorskip("openai", reason="the openai client is not installed")

CONTEXT = 96
CONFIG = ServingConfig(backend="cpu", maximum_new_tokens=64, maximum_running=4, maximum_waiting=4)
MODEL = "riftco"
ASK: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 8}
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Who?"}],
    "max_completion_tokens": 8,
}


@pytest.fixture(scope="module")
def service() -> Iterator[ModelService]:
    with ModelService(any_text_bundle(CONTEXT), CONFIG) as service:
        yield service


@pytest.fixture(scope="module")
def url(service: ModelService) -> Iterator[str]:
    with background_server(service) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with openai.OpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30, _strict_response_validation=True
    ) as client:
        yield client


def generated(service: ModelService, prompt: str, count: int = 8, **sampling: Any) -> str:
    """What the model says when nobody speaks HTTP."""
    result = service.generate(prompt, max_new_tokens=count, **sampling)
    return result.raw_bytes[len(prompt.encode()) :].decode(errors="replace")


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("some/other")
    assert error.value.code == "model_not_found"


def test_a_completion_is_what_the_model_says(client: Any, service: ModelService) -> None:
    answer = client.completions.create(**ASK, temperature=0)
    assert answer.choices[0].text == generated(service, "Once")
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        4,
        8,
        12,
    )
    sampled = client.completions.create(**ASK, **SAMPLED)
    assert sampled.choices[0].text == generated(service, "Once", **SAMPLED)


def test_a_chat_is_the_rendered_conversation_continued(client: Any, service: ModelService) -> None:
    answer = client.chat.completions.create(**CHAT, temperature=0)
    assert answer.choices[0].message.content == generated(service, "### User:\nWho?\n### Assistant:\n")
    parts = [{"type": "text", "text": text} for text in ("Wh", "o?")]
    same = client.chat.completions.create(
        **CHAT | {"messages": [{"role": "user", "content": parts}]}, temperature=0
    )
    assert same.choices == answer.choices


@pytest.mark.parametrize("form", ["object", "model_dump", "to_dict"])
def test_an_answer_may_be_the_next_question_s_beginning(client: Any, form: str) -> None:
    messages: list[Any] = list(CHAT["messages"])
    asked = CHAT | {"max_completion_tokens": 1, "temperature": 0}
    said = client.chat.completions.create(**asked).choices[0].message
    messages.append(said if form == "object" else getattr(said, form)())
    messages.append({"role": "user", "content": "?"})
    answer = client.chat.completions.create(**asked | {"messages": messages})
    messages[1] = {"role": "assistant", "content": said.content}
    assert client.chat.completions.create(**asked | {"messages": messages}).choices == answer.choices


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("Once", ["Once"]),
        (["Once", "Twice"], ["Once", "Twice"]),
        (list(b"Once"), ["Once"]),
        ([list(b"Once"), list(b"Twice")], ["Once", "Twice"]),
    ],
)
def test_prompts_have_four_forms(client: Any, service: ModelService, prompt: Any, texts: list[str]) -> None:
    answer = client.completions.create(**ASK | {"prompt": prompt, "n": 2, "temperature": 0})
    assert [choice.index for choice in answer.choices] == list(range(2 * len(texts)))
    expected = [generated(service, text) for text in texts for _ in range(2)]
    assert [choice.text for choice in answer.choices] == expected
    assert answer.usage.prompt_tokens == sum(map(len, texts))
    assert answer.usage.completion_tokens == 16 * len(texts)


def test_choices_differ_and_repeat_with_their_seed(client: Any) -> None:
    def texts(**changes: Any) -> list[str]:
        answer = client.completions.create(**ASK | {"n": 3, "temperature": 1.5} | changes)
        return [choice.text for choice in answer.choices]

    assert len(set(texts(seed=5))) == 3
    assert texts(seed=5) == texts(seed=5) != texts(seed=6)
    assert texts(seed=5, n=1) == texts(seed=5)[:1]
    assert texts(seed=-1) == texts(seed=2**64 - 1)


def test_without_a_seed_one_is_drawn_and_told(client: Any) -> None:
    asked = ASK | {"temperature": 1.5, "max_tokens": 16}
    first, second = (client.completions.with_raw_response.create(**asked) for _ in range(2))
    assert first.headers["x-riftco-seed"] != second.headers["x-riftco-seed"]
    assert first.parse().choices[0].text != second.parse().choices[0].text
    assert int(first.headers["x-riftco-seed"]) < 2**53  # also for clients whose numbers are doubles
    again = client.completions.create(**asked, seed=int(first.headers["x-riftco-seed"]))
    assert again.choices[0].text == first.parse().choices[0].text


def test_text_ends_before_a_stop_string(client: Any) -> None:
    whole = client.completions.create(**ASK, **SAMPLED).choices[0].text
    for stop in (whole[3:5], ["never", whole[3:5]]):
        choice = client.completions.create(**ASK, **SAMPLED, stop=stop).choices[0]
        assert (choice.text, choice.finish_reason) == (whole[: whole.index(whole[3:5])], "stop")
    chat = client.chat.completions.create(**CHAT, **SAMPLED).choices[0].message.content
    choice = client.chat.completions.create(**CHAT, **SAMPLED, stop=chat[2:4]).choices[0]
    assert (choice.message.content, choice.finish_reason) == (chat[: chat.index(chat[2:4])], "stop")


@pytest.mark.parametrize("count", range(6))
def test_completion_logprobs(client: Any, count: int) -> None:
    choice = client.completions.create(**ASK, temperature=0, logprobs=count).choices[0]
    logprobs = choice.logprobs
    assert [len(top) for top in logprobs.top_logprobs] == [max(1, count)] * 8
    assert len(logprobs.tokens) == len(logprobs.text_offset) == 8
    for token, logprob, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert logprob <= 0
        assert top[token] == max(top.values()) == logprob, "greedy takes the likeliest"
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        rest = choice.text[offset:].lstrip("\ufffd")  # for bytes before it that are no character
        assert token.startswith("bytes:") or rest.startswith(token)


def test_the_token_itself_is_always_among_completion_logprobs(client: Any) -> None:
    choice = client.completions.create(**ASK, temperature=2, seed=5, logprobs=2).choices[0]
    values = zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, strict=True)
    for (token, logprob), top in zip(values, choice.logprobs.top_logprobs, strict=True):
        assert top[token] == logprob
        assert len(top) in (2, 3)
    assert 3 in map(len, choice.logprobs.top_logprobs)


@pytest.mark.parametrize("count", [None, 0, 1, 20])
def test_chat_logprobs(client: Any, count: int | None) -> None:
    asked = CHAT | {"logprobs": True} | ({} if count is None else {"top_logprobs": count})
    choice = client.chat.completions.create(**asked, temperature=0).choices[0]
    content = choice.logprobs.content
    spelled = b"".join(bytes(token.bytes) for token in content)
    assert spelled.decode(errors="replace") == choice.message.content
    for token in content:
        assert len(token.top_logprobs) == (count or 0)
        assert all(other.logprob <= token.logprob for other in token.top_logprobs)


def streamed(response: Iterator[bytes]) -> list[dict[str, Any]]:
    """The events of a stream, which must be well-formed and ended."""
    lines = [line for line in response if line]
    assert lines.pop() == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("changes", [{}, {"n": 3}, {"logprobs": 2}, {"prompt": ["a", "b"], "n": 2}])
def test_a_streamed_completion_is_the_whole_one(client: Any, changes: dict[str, Any]) -> None:
    asked = ASK | SAMPLED | changes
    whole = client.completions.create(**asked)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    # OpenAI's own type for these chunks knows no null finish reason, which its server sends: ours here
    with client.completions.with_streaming_response.create(**asked, **options) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        chunks = [Completion.model_validate(event) for event in streamed(response.iter_lines())]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.model_dump()["total_tokens"] == whole.usage.total_tokens  # type: ignore[union-attr]
    for expected in whole.choices:
        pieces = [c for chunk in chunks for c in chunk.choices if c.index == expected.index]
        assert "".join(piece.text for piece in pieces) == expected.text
        assert [p.finish_reason for p in pieces if p.finish_reason] == [pieces[-1].finish_reason]
        assert pieces[-1].finish_reason == expected.finish_reason
        if expected.logprobs is not None:
            for name, values in expected.logprobs.model_dump().items():
                assert [v for piece in pieces for v in getattr(piece.logprobs, name)] == values


@pytest.mark.parametrize("changes", [{}, {"n": 2}, {"logprobs": True, "top_logprobs": 2}])
@pytest.mark.parametrize("counts", [True, False])
def test_a_streamed_chat_is_the_whole_one(client: Any, changes: dict[str, Any], counts: bool) -> None:
    asked = CHAT | SAMPLED | changes
    whole = client.chat.completions.create(**asked)
    options = {"stream_options": {"include_usage": True}} if counts else {}
    chunks = list(client.chat.completions.create(**asked, stream=True, **options))
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert [usage.completion_tokens for usage in usages] == [whole.usage.completion_tokens] * counts
    for expected in whole.choices:
        pieces = [c for chunk in chunks for c in chunk.choices if c.index == expected.index]
        assert pieces[0].delta.role == "assistant"
        assert "".join(piece.delta.content or "" for piece in pieces) == expected.message.content
        assert [p.finish_reason for p in pieces if p.finish_reason] == [expected.finish_reason]
        if expected.logprobs is not None:
            parts = [token for p in pieces if p.logprobs for token in p.logprobs.content]
            assert parts == expected.logprobs.content


def test_cached_prompt_tokens_are_counted(client: Any) -> None:
    prompt = "A beginning that two requests have in common, and"
    first, second = (client.completions.create(**ASK | {"prompt": prompt}, temperature=0) for _ in range(2))
    assert first.choices[0].text == second.choices[0].text
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert 16 <= second.usage.prompt_tokens_details.cached_tokens < len(prompt)


@pytest.mark.parametrize(
    "changes",
    [
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"top_p": 0.01},
        {"extra_body": {"top_k": 1}},
        {"extra_body": {"min_p": 0.99}},
        {"extra_body": {"repetition_penalty": 2.0}},
    ],
    ids=lambda changes: str(changes),
)
def test_each_sampling_setting_changes_what_is_drawn(client: Any, changes: dict[str, Any]) -> None:
    asked = ASK | {"max_tokens": 24, "temperature": 1.0, "seed": 11}
    plain = client.completions.create(**asked).choices[0].text
    assert client.completions.create(**asked, **changes).choices[0].text != plain


@pytest.mark.parametrize("extra", [{"top_k": 1}, {"top_k": 2**32 - 1, "min_p": 1.0}])
def test_one_candidate_is_greedy(client: Any, extra: dict[str, Any]) -> None:
    greedy = client.completions.create(**ASK, temperature=0).choices[0].text
    assert client.completions.create(**ASK, temperature=2, extra_body=extra).choices[0].text == greedy


def test_a_full_context_ends_an_answer(client: Any) -> None:
    answer = client.completions.create(**ASK | {"prompt": "x" * (CONTEXT - 5), "max_tokens": 20})
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 5)
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(**ASK | {"prompt": "x" * CONTEXT})
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "prompt")


@pytest.mark.parametrize(
    "neutral",
    [
        {"echo": False, "best_of": 1, "suffix": "", "logit_bias": {}, "user": "me"},
        dict.fromkeys(("n", "stop", "seed", "temperature", "top_p", "logprobs", "stream_options")),
    ],
)
def test_values_that_ask_for_nothing_are_accepted(client: Any, neutral: dict[str, Any]) -> None:
    assert client.completions.create(**ASK, extra_body=neutral).choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("changes", "param", "code"),
    [
        ({"echo": True}, "echo", "unsupported_parameter"),
        ({"best_of": 3}, "best_of", "unsupported_parameter"),
        ({"suffix": "x"}, "suffix", "unsupported_parameter"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "unsupported_parameter"),
        ({"extra_body": {"guided_regex": "a"}}, "guided_regex", "unsupported_parameter"),
        ({"n": 17}, "n", "invalid_value"),
        ({"n": 9}, "n", "invalid_value"),  # more than may run and wait
        ({"prompt": ["a"] * 9}, "prompt", "invalid_value"),
        ({"prompt": ["a"] * 3, "n": 3}, "n", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": 65}, "max_tokens", "invalid_value"),
        ({"temperature": 2.1}, "temperature", "invalid_value"),
        ({"temperature": True}, "temperature", "invalid_value"),
        ({"temperature": "1"}, "temperature", "invalid_value"),
        ({"top_p": 5e-324}, "top_p", "invalid_value"),
        ({"extra_body": {"repetition_penalty": 5e-324}}, "repetition_penalty", "invalid_value"),
        ({"logprobs": 6}, "logprobs", "invalid_value"),
        ({"stop": ["a"] * 5}, "stop", "invalid_value"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": [255]}, "prompt", "invalid_value"),
        ({"prompt": [1, "a"]}, "prompt", "invalid_value"),
        ({"prompt": [[1], "a"]}, "prompt", "invalid_value"),
        ({"seed": 2**64}, "seed", "invalid_value"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_served_is_refused_by_name(
    client: Any, changes: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(**ASK | changes)
    assert (error.value.param, error.value.code, error.value.type) == (param, code, "invalid_request_error")
    assert error.value.response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("changes", "param", "code"),
    [
        ({"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "unsupported_parameter"),
        ({"max_tokens": 3}, "max_tokens", "invalid_value"),
        ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, "messages", "invalid_value"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "invalid_value"),
        ({"messages": [{"role": "user", "content": None}]}, "messages", "invalid_value"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "invalid_value"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages", "invalid_value"),
        ({"messages": [{"role": "user", "content": " \n"}]}, "messages", "invalid_value"),
        ({"messages": [{"role": "user", "content": "x" * CONTEXT}]}, "messages", "context_length_exceeded"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_chats_that_cannot_be_served_are_refused_by_name(
    client: Any, changes: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**CHAT | changes)
    assert (error.value.param, error.value.code) == (param, code)


def test_an_unknown_model_is_a_404(client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="known are riftco"):
        client.completions.create(**ASK | {"model": "gpt"})


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"riftco","model":"riftco","prompt":"a"}',
        b'{"model":"riftco","prompt":"a","temperature":NaN}',
        b'{"model":"riftco","prompt":"a","temperature":1e999}',
        b'{"model":"riftco","prompt":"a","seed":' + b"9" * 5_000 + b"}",
        b'{"model":"riftco","prompt":"\\ud800"}',
        b'{"model":"riftco","prompt":"a","user":"\\udfff"}',
        b'{"model":"riftco","prompt":"a","\\udfff":1}',
        b'{"model":"riftco","prompt":' + b"[" * 100_000,
        b'{"model":"riftco","prompt":' + b"[" * 900 + b"]" * 900 + b"}",
        b"[]",
        b'{"model":"riftco","prompt":"a"} {}',
        b"\xff",
        b"{}",
    ],
    ids=lambda body: body[:50].decode("latin-1"),
)
def test_json_that_means_nothing_or_two_things_is_a_400(url: str, body: bytes) -> None:
    answer = exchange(url, post(body, "/v1/completions"))
    assert answer.status == 400
    assert answer.json["error"].keys() == {"message", "type", "param", "code"}


def finished(service: ModelService) -> int:
    return sum(service.engine.stats().requests_finished.values())


def test_too_many_requests_are_told_when_to_come_back(client: Any, url: str, service: ModelService) -> None:
    before = finished(service)
    full = ASK | {"n": CONFIG.maximum_running + CONFIG.maximum_waiting}
    with held_engine(service) as hold, connect(url) as connection:
        connection.sendall(post(full, "/v1/completions"))
        assert hold.reached.wait(10)
        with pytest.raises(openai.RateLimitError) as error:
            client.completions.create(**ASK)
    assert error.value.code == "queue_full"
    assert int(error.value.response.headers["retry-after"]) >= 1
    assert "x-should-retry" not in error.value.response.headers
    assert wait_until(lambda: finished(service) == before + full["n"])


def test_a_failing_model_is_an_error_in_either_form(
    client: Any, service: ModelService, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_from_step(0, service, monkeypatch)
    with pytest.raises(openai.InternalServerError, match="generation failed"):
        client.completions.create(**ASK)
    with pytest.raises(openai.InternalServerError, match="generation failed"):
        client.chat.completions.create(**CHAT, stream=True)
    monkeypatch.undo()

    has_begun = Event()  # else the failure may come with the first tokens, and be a status
    fail_from_step(2, service, monkeypatch, once=has_begun)
    with client.chat.completions.create(**CHAT, stream=True) as begun:
        has_begun.set()
        with pytest.raises(openai.APIError, match="generation failed"):
            list(begun)
    monkeypatch.undo()
    assert client.completions.create(**ASK).choices[0].finish_reason == "length"
