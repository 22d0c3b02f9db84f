"""Lines a model writes: the samples and answers that a report shows and grades."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

from artifacts import ModelBundle
from riftco.config import ServingConfig
from riftco.data import PlainChatFormatter
from riftco.serving import ModelService
from riftco.serving.engine import Event, GenerationRequest, SamplingParams

Progress = Callable[[int, int], None]
NEWLINE = "\n"
ANSWER_TOKENS = 24
_ROOM = 8  # a long prompt leaves an eighth of the context for what follows it


def sample_lines(bundle: ModelBundle, count: int, seed: int, progress: Progress) -> list[str]:
    """`count` lines drawn at temperature 1, each from a lone newline: where a document begins and ends."""
    with _service(bundle, count) as service:
        sampling = SamplingParams(temperature=1.0, seed=seed)
        request = _line_request(service, NEWLINE, service.maximum_context, sampling, choices=count)
        return _complete(service, [request], progress)


def answer_prompts(bundle: ModelBundle, prompts: Sequence[str], progress: Progress) -> list[str]:
    """The model's greedy answer to each prompt in the chat template: one line of at most 24 tokens."""
    template = PlainChatFormatter()
    with _service(bundle, len(prompts)) as service:
        texts = [template.format_prompt(prompt) for prompt in prompts]
        requests = [_line_request(service, text, ANSWER_TOKENS, SamplingParams()) for text in texts]
        return _complete(service, requests, progress)


def _service(bundle: ModelBundle, lines: int) -> ModelService:
    return ModelService(bundle, ServingConfig(backend="cpu", maximum_waiting=lines))


def _line_request(
    service: ModelService, text: str, limit: int, sampling: SamplingParams, choices: int = 1
) -> GenerationRequest:
    """What follows the text's newest tokens: up to a newline, the end of text or of the context, or `limit`
    tokens."""
    newest = max(1, service.maximum_context - max(1, service.maximum_context // _ROOM))
    prompt_ids = service.prompt_ids(text)[-newest:]
    return GenerationRequest(prompt_ids, limit, sampling, choices=choices, stop=(NEWLINE,), overflow="stop")


def _complete(service: ModelService, requests: Sequence[GenerationRequest], progress: Progress) -> list[str]:
    """The lines of all requests, computed together, in the order of the requests and their choices."""
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
