"""From the engine's events to OpenAI's answers: completions and chats, whole or as the chunks of a stream."""

import time
from codecs import getincrementaldecoder
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

from riftco.serving.engine import Event, TokenLogprob, Usage
from riftco.serving.http.answers import error_value
from riftco.serving.http.dispatch import failure
from riftco.serving.http.events import EventQueue
from riftco.serving.http.openai_requests import Task
from riftco.serving.http.request_policy import RefusedError

Vocabulary = Sequence[bytes]
Value = dict[str, Any]


class Style(Protocol):
    """How one of the two routes words its answers."""

    path: str
    prefix: str
    kind: str
    chunk_kind: str

    def whole(self, choice: "Choice", vocabulary: Vocabulary) -> Value:
        """What a finished choice says beyond its index and finish reason."""

    def opening(self, index: int) -> Value | None:
        """The choice's first chunk, before any text."""

    def piece(self, choice: "Choice", event: Event, vocabulary: Vocabulary) -> Value:
        """What an event adds, `choice` being as it was before."""


@dataclass(slots=True)
class Choice:
    """What is known of one choice so far."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    asks_logprobs: bool = False
    offset: int = 0
    finish: str | None = None
    usage: Usage | None = None
    decoder: Any = field(default_factory=lambda: getincrementaldecoder("utf-8")("replace"))

    def extend(self, event: Event) -> None:
        """Take in one more event."""
        self.text += event.text
        self.logprobs += event.logprobs
        self.finish, self.usage = event.finish, event.usage


class Writer:
    """Words one request's answer in the style of its route."""

    def __init__(self, task: Task, style: Style) -> None:
        self._task, self._style = task, style
        asks = task.generations[0].top_logprobs is not None
        count = len(task.generations) * task.choices
        self._choices = [Choice(asks_logprobs=asks) for _ in range(count)]
        self._vocabulary = task.service.tokenizer.vocabulary
        mode = task.service.config.mode
        self._head = {
            "id": f"{style.prefix}-{uuid4().hex}",
            "created": int(time.time()),
            "model": task.asked.model,
            "system_fingerprint": f"riftco-{task.service.artifact_id[:12]}-{mode}",
        }

    async def collect(self, queue: EventQueue) -> None:
        """Await all of the answer; RefusedError when a choice failed."""
        async for index, event in queue:
            refusal = failure(event)
            if refusal is not None:
                raise RefusedError(refusal)
            self._choice(index, event)[1].extend(event)

    def whole(self) -> Value:
        """What was collected, in one piece."""
        choices = [
            {"index": i, "finish_reason": c.finish, **self._style.whole(c, self._vocabulary)}
            for i, c in enumerate(self._choices)
        ]
        return {**self._head, "object": self._style.kind, "choices": choices, "usage": self._usage()}

    async def chunks(self, queue: EventQueue) -> AsyncIterator[Value]:
        """The answer as it comes into being; a failure is its last chunk, or a RefusedError as its first."""
        options = self._task.asked.stream_options
        counts = bool(options and options.include_usage)
        openings = [o for i in range(len(self._choices)) if (o := self._style.opening(i)) is not None]
        begun = False
        async for request, event in queue:
            refusal = failure(event)
            if refusal is not None:
                if not begun:
                    raise RefusedError(refusal)
                yield error_value(refusal, self._style.path)
                return
            while openings:
                begun = True
                yield self._chunk([openings.pop(0)], counts)
            index, choice = self._choice(request, event)
            if event.text or event.logprobs or event.finish:
                begun, piece = True, self._style.piece(choice, event, self._vocabulary)
                yield self._chunk([{"index": index, "finish_reason": event.finish, **piece}], counts)
            choice.extend(event)
        if counts:
            yield {**self._chunk([], False), "usage": self._usage()}

    def _choice(self, request: int, event: Event) -> tuple[int, Choice]:
        index = request * self._task.choices + event.choice
        return index, self._choices[index]

    def _chunk(self, choices: list[Value], counts: bool) -> Value:
        usage = {"usage": None} if counts else {}
        return {**self._head, "object": self._style.chunk_kind, "choices": choices, **usage}

    def _usage(self) -> Value:
        """A prompt counts once however many choices it has."""
        usages = [choice.usage for choice in self._choices if choice.usage is not None]
        firsts = usages[:: self._task.choices]
        prompt = sum(usage.prompt_tokens for usage in firsts)
        generated = sum(usage.generated_tokens for usage in usages)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in firsts)},
        }


class CompletionStyle:
    """`/v1/completions`."""

    path, prefix = "/v1/completions", "cmpl"
    kind = chunk_kind = "text_completion"

    def whole(self, choice: Choice, vocabulary: Vocabulary) -> Value:
        return {"text": choice.text, "logprobs": self._logprobs(choice, choice.logprobs, vocabulary)}

    def opening(self, index: int) -> Value | None:
        return None

    def piece(self, choice: Choice, event: Event, vocabulary: Vocabulary) -> Value:
        return {"text": event.text, "logprobs": self._logprobs(choice, event.logprobs, vocabulary)}

    def _logprobs(
        self, choice: Choice, logprobs: Sequence[TokenLogprob], vocabulary: Vocabulary
    ) -> Value | None:
        if not choice.asks_logprobs:
            return None
        offsets = []
        for one in logprobs:
            offsets.append(choice.offset)
            choice.offset += len(choice.decoder.decode(vocabulary[one.token_id]))
        return {
            "tokens": [spelled(vocabulary[one.token_id]) for one in logprobs],
            "token_logprobs": [one.logprob for one in logprobs],
            "top_logprobs": [
                # with the token itself, as OpenAI's has it, also where it is none of the likeliest
                {spelled(vocabulary[i]): logprob for i, logprob in (*one.top, (one.token_id, one.logprob))}
                for one in logprobs
            ],
            "text_offset": offsets,
        }


class ChatStyle:
    """`/v1/chat/completions`."""

    path, prefix = "/v1/chat/completions", "chatcmpl"
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def whole(self, choice: Choice, vocabulary: Vocabulary) -> Value:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(choice, choice.logprobs, vocabulary)}

    def opening(self, index: int) -> Value | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def piece(self, choice: Choice, event: Event, vocabulary: Vocabulary) -> Value:
        delta = {"content": event.text} if event.text else {}
        return {"delta": delta, "logprobs": self._logprobs(choice, event.logprobs, vocabulary)}

    def _logprobs(
        self, choice: Choice, logprobs: Iterable[TokenLogprob], vocabulary: Vocabulary
    ) -> Value | None:
        if not choice.asks_logprobs:
            return None
        content = [
            _token(vocabulary[one.token_id], one.logprob)
            | {"top_logprobs": [_token(vocabulary[token_id], logprob) for token_id, logprob in one.top]}
            for one in logprobs
        ]
        return {"content": content, "refusal": None}


def spelled(piece: bytes) -> str:
    """A token's text; OpenAI's spelling of bytes that are none, so that different tokens stay different."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _token(piece: bytes, logprob: float) -> Value:
    return {"token": spelled(piece), "logprob": logprob, "bytes": list(piece)}
