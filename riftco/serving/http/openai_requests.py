"""From the body of an OpenAI request to what the engine is asked: one generation for each prompt."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from riftco.chat_template import ChatMessage, Role
from riftco.serving.engine import GenerationRequest, SamplingParams
from riftco.serving.http.dispatch import bad_request
from riftco.serving.http.openai_schema import UNSERVED, ChatRequest, CompletionRequest, Message, Sampling
from riftco.serving.http.request_policy import Refusal, RefusedError
from riftco.serving.http.strict_json import parse_object
from riftco.serving.service import ModelService

_DEFAULT_COMPLETION_TOKENS = 16
_SEEDS = 2**64
_DRAWN_BITS = 53  # a seed is handed out, and clients whose numbers are doubles hand it back
_LONGEST_ECHO = 64
_CODES = {"extra_forbidden": "unsupported_parameter", "missing": "missing_required_parameter"}

Request = TypeVar("Request", bound=Sampling)


@dataclass(frozen=True, slots=True)
class Task:
    """A request ready for the engine: the service that will answer, and one generation for each prompt."""

    asked: Sampling
    service: ModelService
    generations: tuple[GenerationRequest, ...]

    @property
    def seed(self) -> int:
        """The seed given or drawn."""
        return self.generations[0].sampling.seed

    @property
    def choices(self) -> int:
        """Of each prompt."""
        return self.generations[0].choices


def parse_request(body: bytes, kind: type[Request]) -> Request:
    """The request that a body holds; RefusedError (400) names the parameter that is wrong."""
    try:
        return kind.model_validate(parse_object(body))
    except ValidationError as error:
        raise RefusedError(_refusal(_telling(error.errors(include_url=False, include_input=False)))) from None
    except ValueError as error:
        raise RefusedError(bad_request(str(error), code="invalid_json")) from None


def completion_task(asked: CompletionRequest, service: ModelService, salt: bytes) -> Task:
    """What to do for `/v1/completions`. RefusedError says why it cannot be done."""
    prompts = [_token_ids(service, prompt) for prompt in _prompts(asked.prompt)]
    most = _count(service, "max_tokens", asked.max_tokens, _DEFAULT_COMPLETION_TOKENS)
    stop = _texts(asked.stop)
    return _task(asked, service, salt, prompts, "prompt", most, stop, asked.logprobs)


def chat_task(asked: ChatRequest, service: ModelService, salt: bytes) -> Task:
    """What to do for `/v1/chat/completions`. RefusedError says why it cannot be done."""
    if asked.top_logprobs is not None and not asked.logprobs:
        raise RefusedError(bad_request("top_logprobs needs logprobs", "invalid_value", "top_logprobs"))
    if asked.max_tokens is not None and asked.max_completion_tokens is not None:
        detail = "max_tokens and max_completion_tokens are one setting; give one of them"
        raise RefusedError(bad_request(detail, "invalid_value", "max_tokens"))
    try:
        prompt_ids = service.prompt_ids(service.template.render([_chat_message(m) for m in asked.messages]))
    except ValueError as error:
        raise RefusedError(bad_request(str(error), "invalid_value", "messages")) from None
    name = "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"
    most = _count(service, name, getattr(asked, name), service.config.maximum_new_tokens)
    stop = _texts(asked.stop) + service.template.stop
    logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
    return _task(asked, service, salt, [prompt_ids], "messages", most, stop, logprobs)


def _task(
    asked: Sampling,
    service: ModelService,
    salt: bytes,
    prompts: Sequence[tuple[int, ...]],
    param: str,
    most: int,
    stop: tuple[str, ...],
    logprobs: int | None,
) -> Task:
    if asked.stream_options is not None and not asked.stream:
        raise RefusedError(bad_request("stream_options needs stream", "invalid_value", "stream_options"))
    longest = max(map(len, prompts))
    if longest >= service.maximum_context:
        detail = (
            f"{param} has {longest} tokens and the model's context {service.maximum_context}; "
            "at least one token must be able to follow"
        )
        raise RefusedError(bad_request(detail, "context_length_exceeded", param))
    choices = asked.n or 1
    room = service.config.maximum_running + service.config.maximum_waiting
    if len(prompts) * choices > room:
        detail = f"{len(prompts)} prompts with {choices} choices each; at most {room} choices are admitted"
        raise RefusedError(bad_request(detail, "invalid_value", "n" if choices > 1 else param))
    sampling = _sampling(asked, len(service.tokenizer.vocabulary))
    generations = tuple(
        GenerationRequest(
            prompt_ids,
            most,
            sampling,
            choices=choices,
            stop=stop,
            overflow="stop",
            top_logprobs=logprobs,
            seconds=service.config.request_seconds,
            salt=salt,
        )
        for prompt_ids in prompts
    )
    return Task(asked, service, generations)


def _sampling(asked: Sampling, vocabulary_size: int) -> SamplingParams:
    return SamplingParams(
        temperature=_or(asked.temperature, 1.0),
        top_k=None if asked.top_k is None else min(asked.top_k, vocabulary_size),
        top_p=_or(asked.top_p, 1.0),
        min_p=_or(asked.min_p, 0.0),
        repetition_penalty=_or(asked.repetition_penalty, 1.0),
        presence_penalty=_or(asked.presence_penalty, 0.0),
        frequency_penalty=_or(asked.frequency_penalty, 0.0),
        seed=secrets.randbits(_DRAWN_BITS) if asked.seed is None else asked.seed % _SEEDS,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _count(service: ModelService, param: str, count: int | None, default: int) -> int:
    limit = service.config.maximum_new_tokens
    if count is None:
        return min(default, limit)
    if count > limit:
        detail = f"{param} {count} exceeds the serving limit {limit}"
        raise RefusedError(bad_request(detail, "invalid_value", param))
    return count


def _prompts(prompt: Any) -> list[Any]:
    """The prompts of any of the four forms, each a text or a list of token ids."""
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


def _token_ids(service: ModelService, prompt: str | list[int]) -> tuple[int, ...]:
    if not isinstance(prompt, str):
        size = len(service.tokenizer.vocabulary)
        if max(prompt) >= size:
            detail = f"token id {max(prompt)} is outside the vocabulary of {size}"
            raise RefusedError(bad_request(detail, "invalid_value", "prompt"))
        return tuple(prompt)
    try:
        return service.prompt_ids(prompt)
    except ValueError as error:
        raise RefusedError(bad_request(str(error), "invalid_value", "prompt")) from None


def _chat_message(message: Message) -> ChatMessage:
    """A developer's message is what a system's was called before."""
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    role: Role = "system" if message.role == "developer" else message.role
    return ChatMessage(role, text)


def _texts(stop: str | list[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def _telling(errors: list[ErrorDetails]) -> ErrorDetails:
    """Of the errors of the first parameter that is wrong, the one that says most.

    Where a value may have several forms there is one for each: what is wrong inside of the form that it has
    comes before not having a form, and what is found further on before the rest.
    """

    def says(error: ErrorDetails) -> tuple[bool, int, int]:
        last = error["loc"][-1]
        return not error["type"].endswith("_type"), len(error["loc"]), last if isinstance(last, int) else -1

    return max((error for error in errors if error["loc"][:1] == errors[0]["loc"][:1]), key=says)


def _refusal(error: ErrorDetails) -> Refusal:
    """A 400 that names the parameter, and says whether it is one that nobody serves here."""
    param = ascii(str(error["loc"][0]))[1:-1][:_LONGEST_ECHO] if error["loc"] else ""
    code = _CODES.get(error["type"], "invalid_value")
    if code == "unsupported_parameter" and len(error["loc"]) == 1:
        detail = f"the parameter {param} is not supported"
    elif param in UNSERVED:
        code, detail = "unsupported_parameter", f"this value of {param} is not supported: {error['msg']}"
    else:
        path = ".".join(str(part) for part in error["loc"] if isinstance(part, int) or _is_field(part))
        detail = f"{ascii(path)[1:-1][: 2 * _LONGEST_ECHO]}: {error['msg']}"
    return Refusal(HTTPStatus.BAD_REQUEST, detail, code=code, param=param or None)


def _is_field(part: str) -> bool:
    """Whether a part of an error's place is a name in the body, rather than that of a form."""
    return part != "str" and "[" not in part and not part.startswith("constrained-")
