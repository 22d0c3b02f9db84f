"""`POST /v1/generate`, the original's route: one prompt, the whole answer at once or, new here, as a stream.

Beyond the original's fields: `stream`, `stop` (strings before which the text ends), `logprobs` (0 to 20,
with a stream only) and `model`.
"""

import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from riftco.serving.engine import Event, GenerationRequest
from riftco.serving.generator import require_count
from riftco.serving.http.answers import error_value, json_answer
from riftco.serving.http.dispatch import Client, Dispatch, Handler, answering, bad_request, failure, in_thread
from riftco.serving.http.events import EventQueue, EventStream
from riftco.serving.http.request_policy import RefusedError
from riftco.serving.service import ModelService, contract_sampling

PATH = "/v1/generate"
_MOST_STOPS, _LONGEST_STOP = 16, 1_000  # each is looked for after each token
Result = TypeVar("Result")
_FIELDS = frozenset(
    {"prompt", "max_new_tokens", "temperature", "top_k", "seed", "stream", "stop", "logprobs", "model"}
)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request as understood: without a generation where no token is asked for."""

    prompt: str
    prompt_ids: tuple[int, ...]
    service: ModelService
    model: str | None
    generation: GenerationRequest | None
    stream: bool


def generate_handler(dispatch: Dispatch) -> Handler:
    """The route's handler."""

    @answering
    async def generate(request: Request) -> Response:
        client, body = Client.of(request), await request.body()
        fields = await in_thread(_understood, partial(request_fields, body))
        service = await dispatch.borrow(fields.get("model"), client)
        asked = await in_thread(_understood, partial(_asked, service, fields, client.salt))
        queue = None
        if asked.generation is not None:
            queue = dispatch.submit(asked.service, asked.model, [asked.generation], client)
        if asked.stream:
            return EventStream(_stream(asked, queue))
        return await in_thread(_answer, asked, await _tokens(queue))

    return generate


def _understood(read: Callable[[], Result]) -> Result:
    """What a part of a request says; RefusedError (400) where it is wrong."""
    try:
        return read()
    except (TypeError, ValueError) as error:
        raise RefusedError(bad_request(str(error))) from None


def request_fields(body: bytes) -> dict[str, Any]:
    """The fields of a generation request; a field given twice counts the last time.

    TypeError or ValueError unless the body is a UTF-8 JSON object with a text `prompt` and known fields.
    """
    try:
        value = json.loads(body.decode("utf-8"))
    except RecursionError:
        raise ValueError("request JSON is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("request JSON must be an object")
    unknown = sorted(value.keys() - _FIELDS)
    if unknown:
        raise ValueError(f"unknown request fields: {', '.join(unknown)}")
    if "prompt" not in value:
        raise ValueError("request requires prompt")
    if not isinstance(value["prompt"], str):
        raise TypeError("prompt must be a string")
    if not isinstance(value.get("model", ""), str):
        raise TypeError("model must be a string")
    value["prompt"].encode("utf-8")  # UnicodeEncodeError, a ValueError, for lone surrogates
    return value


def _asked(service: ModelService, fields: dict[str, Any], salt: bytes) -> _Asked:
    """Checks in the contract's order: count, temperature, top_k and seed, prompt, then what is ours."""
    count = fields.get("max_new_tokens", 32)
    require_count(count, service.config.maximum_new_tokens)
    sampling = contract_sampling(fields.get("temperature", 0.0), fields.get("top_k"), fields.get("seed", 0))
    prompt_ids = service.prompt_ids(fields["prompt"])
    if count and (sampling.top_k or 0) > len(service.tokenizer.vocabulary):
        raise ValueError("top_k must not exceed the number of logits")
    stream, logprobs = fields.get("stream", False), fields.get("logprobs")
    if not isinstance(stream, bool):
        raise TypeError("stream must be true or false")
    if logprobs is not None and not stream:
        raise ValueError("logprobs needs a stream")
    request = GenerationRequest(
        prompt_ids,
        max(1, count),
        sampling,
        stop=_stop(fields.get("stop")),
        top_logprobs=logprobs,
        seconds=service.config.request_seconds,
        salt=salt,
    )
    generation = request if count else None
    return _Asked(fields["prompt"], prompt_ids, service, fields.get("model"), generation, stream)


def _stop(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise TypeError("stop must be a string or a list of strings")
    if len(texts) > _MOST_STOPS or any(len(text) > _LONGEST_STOP for text in texts):
        raise ValueError(f"stop may hold {_MOST_STOPS} strings of {_LONGEST_STOP} characters")
    return tuple(texts)


async def _tokens(queue: EventQueue | None) -> list[Event]:
    """All events; RefusedError when the last one tells of a failure."""
    events = [event async for _, event in queue] if queue is not None else []
    refusal = failure(events[-1]) if events else None
    if refusal is not None:
        raise RefusedError(refusal)
    return events


def _answer(asked: _Asked, events: Sequence[Event]) -> Response:
    generated_ids = [token_id for event in events for token_id in event.token_ids]
    generated = "".join(event.text for event in events)
    value = {
        "artifact_id": asked.service.artifact_id,
        "prompt": asked.prompt,
        "text": asked.prompt + generated,
        "generated_text": generated,
        "prompt_token_ids": asked.prompt_ids,
        "generated_token_ids": generated_ids,
        "token_ids": [*asked.prompt_ids, *generated_ids],
    }
    return json_answer(value)


async def _stream(asked: _Asked, queue: EventQueue | None) -> AsyncIterator[dict[str, Any]]:
    """The events of an answer; a failure is the last one, or a RefusedError where it is the first."""
    vocabulary = asked.service.tokenizer.vocabulary
    usage = {"prompt_tokens": len(asked.prompt_ids), "cached_tokens": 0, "generated_tokens": 0}
    last: dict[str, Any] = {"finish_reason": "length", "usage": usage}
    begun = False
    if queue is not None:
        async for _, event in queue:
            if event.token_ids or event.text:
                begun = True
                yield _news(event, vocabulary)
            if event.finish is not None:
                last["finish_reason"] = event.finish
                last["usage"] = usage if event.usage is None else asdict(event.usage)
                refusal = failure(event)
                if refusal and not begun:
                    raise RefusedError(refusal)
                last |= error_value(refusal, PATH) if refusal else {}
    yield last


def _news(event: Event, vocabulary: Sequence[bytes]) -> dict[str, Any]:
    value: dict[str, Any] = {"token_ids": event.token_ids, "text": event.text}
    if event.logprobs:
        value["tokens"] = [_text(vocabulary[i]) for i in event.token_ids]
        value["logprobs"] = [
            {
                "token_id": one.token_id,
                "logprob": one.logprob,
                "top": [(i, logprob, _text(vocabulary[i])) for i, logprob in one.top],
            }
            for one in event.logprobs
        ]
    return value


def _text(piece: bytes) -> str:
    return piece.decode("utf-8", errors="replace")
