"""What a load run asks for, and the prompts it sends."""

import random
from collections.abc import Callable
from dataclasses import dataclass

Prompt = str | list[int]
WritePrompt = Callable[[int, int], Prompt]
"""The prompt of a request, from the number of its level and its own number there; always the same one."""

_WORDS = [
    *("time", "way", "year", "work", "day", "world", "life", "hand", "part", "child", "eye", "place"),
    *("week", "case", "point", "home", "water", "room", "area", "money", "story", "fact", "month", "lot"),
    *("right", "book", "job", "word", "side", "kind", "head", "house", "friend", "hour", "game", "line"),
]


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of one level; a level is a number of requests in flight."""

    requests: int = 64
    prompt_tokens: int = 64
    shared: float = 0.0
    """Share of every prompt, from its beginning, that all requests of a level have in common, 0 to 1."""
    new_tokens: int = 32
    temperature: float = 0.0
    seed: int = 0
    same_prompts: bool = False
    """Every level sends the prompts of the first, so that its answers can be compared."""

    def body(self, model: str, prompt: Prompt, request: int) -> dict[str, object]:
        """The JSON of a `/v1/completions` request."""
        return {
            "model": model,
            "prompt": prompt,
            "max_tokens": self.new_tokens,
            "temperature": self.temperature,
            "seed": self.seed + request,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def id_prompts(load: Load, vocabulary_size: int) -> WritePrompt:
    """Prompts of exactly `load.prompt_tokens` random token ids."""

    def write(level: int, request: int) -> Prompt:
        common, own = _parts(load, level, request, load.prompt_tokens)
        return [source.randrange(vocabulary_size) for source in (*common, *own)]

    return write


def word_prompts(load: Load, tokens_per_word: float) -> WritePrompt:
    """Prompts of random English words, about `load.prompt_tokens` tokens long."""

    def write(level: int, request: int) -> Prompt:
        common, own = _parts(load, level, request, max(1, round(load.prompt_tokens / tokens_per_word)))
        return " ".join(source.choice(_WORDS) for source in (*common, *own))

    return write


def _parts(
    load: Load, level: int, request: int, length: int
) -> tuple[list[random.Random], list[random.Random]]:
    """For each place of a prompt the source of what stands there: the level's, then the request's."""
    level = min(level, 0) if load.same_prompts else level  # what comes before the first is never measured
    common = round(length * load.shared)
    shared, own = (random.Random(f"{load.seed} {level} {part}") for part in ("shared", request))
    return [shared] * common, [own] * (length - common)
