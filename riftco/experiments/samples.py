"""Texts a model writes: the samples and answers that a report shows and grades."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

from artifacts import ModelBundle
from riftco.chat_template import PLAIN
from riftco.config import ServingConfig
from riftco.data import InstructionExample, PlainChatFormatter, format_parts
from riftco.serving import ModelService
from riftco.serving.engine import Event, GenerationRequest, SamplingParams

Progress = Callable[[int, int], None]
NEWLINE = "\n"
LEAST_ANSWER_TOKENS = 24


def sample_documents(bundle: ModelBundle, count: int, seed: int, progress: Progress) -> list[str]:
    """`count` documents drawn at temperature 1, each from a lone newline, which is where one begins.

    Each ends with the end of text, where the tokenizer has none with its first line, or with the context.
    """
    with _service(bundle, count) as service:
        sampling = SamplingParams(temperature=1.0, seed=seed)
        stop = (NEWLINE,) if service.tokenizer.end_of_text_id is None else ()
        prompt_ids, limit = service.prompt_ids(NEWLINE), service.maximum_context
        request = GenerationRequest(prompt_ids, limit, sampling, choices=count, stop=stop, overflow="stop")
        return _complete(service, [request], progress)


def answer_examples(
    bundle: ModelBundle, examples: Sequence[InstructionExample], progress: Progress
) -> list[str | None]:
    """The model's greedy answer to each example's prompt in the chat template.

    None where prompt and response together exceed the context. Every answer may have 2 tokens more than the
    longest of the responses, and at least 24. Without an end of text it ends with its first line or, where a
    response has several, before the next question.
    """
    with _service(bundle, len(examples)) as service:
        encoded = []
        for example in examples:
            prompt, response = format_parts(PlainChatFormatter(), example)
            encoded.append((service.prompt_ids(prompt), service.prompt_ids(response.rstrip(NEWLINE))))
        fits = [len(prompt) + len(response) <= service.maximum_context for prompt, response in encoded]
        limit = max(LEAST_ANSWER_TOKENS, 2 + max((len(response) for _, response in encoded), default=0))
        stop: tuple[str, ...] = ()
        if service.tokenizer.end_of_text_id is None:
            one_line = not any(NEWLINE in example.response.strip() for example in examples)
            stop = (NEWLINE,) if one_line else PLAIN.stop
        asked = [prompt for (prompt, _), fit in zip(encoded, fits, strict=True) if fit]
        requests = [GenerationRequest(prompt, limit, stop=stop, overflow="stop") for prompt in asked]
        answers = iter(_complete(service, requests, progress))
        return [next(answers) if fit else None for fit in fits]


def _service(bundle: ModelBundle, texts: int) -> ModelService:
    return ModelService(bundle, ServingConfig(backend="cpu", maximum_waiting=texts))


def _complete(service: ModelService, requests: Sequence[GenerationRequest], progress: Progress) -> list[str]:
    """The texts of all requests, computed together, in the order of the requests and their choices."""
    events: SimpleQueue[tuple[int, Event]] = SimpleQueue()
    for number, request in enumerate(requests):
        service.engine.submit(request, partial(_put, events, number))
    total, done = sum(request.choices for request in requests), 0
    texts: dict[tuple[int, int], str] = defaultdict(str)
    while done < total:
        number, event = events.get()
        texts[number, event.choice] += event.text
        if event.finish is not None:
            if event.finish == "error":
                raise RuntimeError(event.error)
            done += 1
            progress(done, total)
    return [text.strip() for _, text in sorted(texts.items())]


def _put(events: SimpleQueue[tuple[int, Event]], number: int, event: Event) -> None:
    events.put((number, event))
