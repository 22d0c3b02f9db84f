"""Lines a model writes: the samples and answers that a report shows and grades."""

from collections.abc import Callable, Sequence

from artifacts import ModelBundle
from riftco.data import PlainChatFormatter
from riftco.runtime import ModelRuntime
from riftco.serving import DecodeSession, GreedySampler, TemperatureSampler
from riftco.serving.samplers import Sampler
from riftco.tokenizer import Tokenizer

Progress = Callable[[int, int], None]
NEWLINE = "\n"
ANSWER_TOKENS = 24
_ROOM = 8  # a long prompt leaves an eighth of the context for what follows it


def sample_lines(bundle: ModelBundle, count: int, seed: int, progress: Progress) -> list[str]:
    """`count` lines drawn at temperature 1, each from a lone newline: where a document begins and ends."""
    sampler = TemperatureSampler(seed=seed)
    return _complete(bundle, [NEWLINE] * count, sampler, bundle.config.maximum_context, progress)


def answer_prompts(bundle: ModelBundle, prompts: Sequence[str], progress: Progress) -> list[str]:
    """The model's greedy answer to each prompt in the chat template: one line of at most 24 tokens."""
    template = PlainChatFormatter()
    texts = [template.format_prompt(prompt) for prompt in prompts]
    return _complete(bundle, texts, GreedySampler(), ANSWER_TOKENS, progress)


def _complete(
    bundle: ModelBundle, prompts: Sequence[str], sampler: Sampler, limit: int, progress: Progress
) -> list[str]:
    lines = []
    with ModelRuntime.open(bundle) as runtime, DecodeSession(runtime.model) as session:
        for prompt in prompts:
            session.reset()
            lines.append(complete_line(session, runtime.tokenizer, prompt, sampler, limit))
            progress(len(lines), len(prompts))
    return lines


def complete_line(
    session: DecodeSession, tokenizer: Tokenizer, prompt: str, sampler: Sampler, limit: int
) -> str:
    """What follows the prompt's newest tokens: up to a newline, the end of the text or of the context, or
    `limit` tokens."""
    newest = session.capacity - session.capacity // _ROOM
    written: list[int] = []
    logits = session.extend(tokenizer.encode(prompt)[-newest:])
    while True:
        token_id = sampler(logits)
        ended = token_id == tokenizer.end_of_text_id
        written += [] if ended else [token_id]
        line, newline, _ = tokenizer.decode_bytes(written).partition(NEWLINE.encode())
        if ended or newline or len(written) == limit or session.size == session.capacity:
            return line.decode(errors="replace").strip()
        logits = session.step(token_id)
