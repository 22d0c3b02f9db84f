"""What the model writes while it learns: to the log, and to a file beside the table."""

import json
from collections.abc import Callable
from pathlib import Path

from artifacts.files import write_atomic
from riftco.model import DecoderOnlyTransformer
from riftco.tokenizer import Tokenizer

Sampler = Callable[[int], str]
"""From a step to the text that the model, as it is then, continues the prompt with."""

_TOKENS = 64


def text_sampler(model: DecoderOnlyTransformer, tokenizer: Tokenizer, prompt: str) -> Sampler:
    """Draws up to 64 tokens after the prompt at temperature 1; the step is the seed.

    It changes nothing of the run: no weight, no gradient, no global generator. ValueError at a sample if the
    model's numbers are not finite.
    """

    def sample(step: int) -> str:
        from riftco.serving import TemperatureSampler, TextGenerator  # imports the HTTP service too

        generator = TextGenerator(model, tokenizer, TemperatureSampler(seed=step))
        result = generator.generate(prompt, max_new_tokens=_TOKENS)
        return tokenizer.decode_bytes(result.generated_token_ids).decode(errors="replace")

    return sample


class SampleFile:
    """JSON Lines `{"step": .., "prompt": .., "text": ..}`, each complete in the file as it happens."""

    def __init__(self, path: Path, prompt: str) -> None:
        self.path = path
        self._prompt = prompt

    def begin(self, last_step: int) -> None:
        """Keep what a run that goes on after this step has written until then; 0 starts anew."""
        kept = [line for line in self._lines() if 0 < _step(line) <= last_step]
        if kept:
            write_atomic(self.path, "".join(f"{line}\n" for line in kept).encode())
        else:
            self.path.unlink(missing_ok=True)

    def add(self, step: int, text: str) -> None:
        """Append a sample; OSError if the disk refuses."""
        line = json.dumps({"step": step, "prompt": self._prompt, "text": text}, ensure_ascii=False)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    def _lines(self) -> list[str]:
        text = self.path.read_text(encoding="utf-8", errors="replace") if self.path.exists() else ""
        return text.split("\n")  # not splitlines: U+2028 and its like may stand raw in a sample


def _step(line: str) -> int:
    """The step of a line; 0 if a kill or a full disk left only a part of it."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return 0
