"""What OpenAI's API accepts and answers, as far as it is served here; the source of `/openapi.json`.

Requests are strict: no field beyond these, no conversion between types. A parameter that we know but do not
serve is declared with the one value that asks for nothing. Lists fail fast: an error for each of the half
million things that a body can hold would take seconds.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MOST_CHOICES = 16
_LEAST_SHARE = 1e-6  # above 0, and far from where floats end
_LEAST_SEED, _LARGEST_SEED = -(2**63), 2**64 - 1

TokenId = Annotated[int, Field(ge=0, le=2**32 - 1)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Text = Annotated[str, Field(min_length=1)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Penalty = Annotated[Number, Field(ge=-2, le=2)]
StopText = Annotated[str, Field(min_length=1, max_length=1_000)]
Stop = StopText | Annotated[list[StopText], Field(max_length=4, fail_fast=True)]


class Strict(BaseModel):
    """A part of a request."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(Strict):
    """What a stream holds beyond the text."""

    include_usage: bool | None = None


class Sampling(Strict):
    """What both kinds of completion share. Null means the default."""

    model: Text
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stop: Stop | None = None
    seed: Annotated[int, Field(ge=_LEAST_SEED, le=_LARGEST_SEED)] | None = None
    """None draws one; the answer's `x-riftco-seed` header tells which."""
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(ge=_LEAST_SHARE, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1, le=2**32 - 1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[Number, Field(ge=_LEAST_SHARE, le=2)] | None = None
    user: str | None = None
    """Accepted for the caller's own records."""
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None


class CompletionRequest(Sampling):
    """`POST /v1/completions`."""

    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=MOST_CHOICES, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MOST_CHOICES, fail_fast=True)]
    )
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None


class TextPart(Strict):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """A turn of a conversation, which may be an answer just as OpenAI's client hands it out."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1, fail_fast=True)]
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None


class TextFormat(Strict):
    """Text is what there is."""

    type: Literal["text"]


class ChatRequest(Sampling):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: TextFormat | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None


UNSERVED = frozenset({"logit_bias", "echo", "best_of", "suffix", "response_format", "tools"})
"""Declared with the one value that asks for nothing: any other is `unsupported_parameter`."""


class Answer(BaseModel):
    """A part of an answer."""

    model_config = ConfigDict(extra="forbid")


class PromptTokensDetails(Answer):
    """Of the prompt's tokens, those whose keys and values were found in the cache."""

    cached_tokens: int


class CompletionUsage(Answer):
    """Tokens of all prompts, of all choices, and both."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


Finish = Literal["stop", "length"]


class CompletionLogprobs(Answer):
    """One entry a token in each list; offsets count characters of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Answer):
    """One continuation, or what is new of it; `finish_reason` is null until its last piece."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None


class Completion(Answer):
    """The answer of `/v1/completions`, and each event of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: CompletionUsage | None = None


class TopLogprob(Answer):
    """A token, as text and as bytes, and the logarithm of its probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    """A generated token and the likeliest ones in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    """Log-probabilities of an answer's tokens."""

    content: list[ChatTokenLogprob]
    refusal: None


class AssistantMessage(Answer):
    """The answer's text."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Answer):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatCompletion(Answer):
    """The answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: CompletionUsage


class ModelCard(Answer):
    """A model that can be asked for."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(Answer):
    """All models."""

    object: Literal["list"]
    data: list[ModelCard]


class ErrorBody(Answer):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    """An error of the OpenAI routes."""

    error: ErrorBody
