"""A model without arithmetic: its keys and values say what they are of, and a step looks at all it needs.

What a slot of a page should hold of a real model is determined by the token, its position, and all tokens
before it; here a slot holds just these, the last as a running hash, and the salt of whoever computed it.
The next token is a hash of the window and the sequence's random number. `alone` computes what a request must
give, from the definition, one token after another.
"""

from codecs import getincrementaldecoder
from collections.abc import Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from random import Random

from riftco.serving.engine.request import Drawn, FinishReason, GenerationRequest, TokenLogprob
from riftco.serving.engine.scheduler import Plan, Work

Slot = tuple[int, int, bytes, int]  # token, position, salt, hash of the tokens up to here

EURO, ACCENT = "€".encode(), "é".encode()
VOCABULARY = (
    *(b"", b"a", b"b", b"ab", b"ba", b"c", b" ", b"aa", b"bc", b"\xff", "日".encode()),
    *(ACCENT[:1], ACCENT[1:], EURO[:1], EURO[1:2], EURO[2:]),
)
"""Bytes of each token, some of them parts of characters; token 0 may be the end of text."""


class StaleSlotError(AssertionError):
    """A step saw a slot that does not hold what it should."""


class FakeModel:
    """A runner for `Engine` over pages of labelled slots."""

    def __init__(self, page_count: int, page_size: int) -> None:
        self.page_size = page_size
        self._nothing: list[Slot | None] = [None] * page_size
        self.pages = [self._nothing] * page_count
        self.error: Exception | None = None  # raised by the next step, after it has written
        self.fault: StaleSlotError | None = None  # kept, because an engine survives what a step raises

    def run(self, plan: Plan) -> list[Drawn]:
        self.forget(page for work in plan.work for page in work.new_pages)
        for source, target in plan.copies:
            self.pages[target] = list(self.pages[source])
        for work in plan.work:
            self._write(work)
        chains = [self._read(work) for work in plan.work]
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return [
            self._draw(work, chain) for work, chain in zip(plan.work, chains, strict=True) if work.samples
        ]

    def forget(self, pages: Iterable[int]) -> None:
        """Spoil pages: nothing may rely on them."""
        for page in pages:
            self.pages[page] = self._nothing

    def spoil(self, plan: Plan) -> None:
        """Spoil every slot that a plan was to write, as a forward that fails midway may."""
        for work in plan.work:
            for position in range(work.begin, work.begin + work.count):
                self._put(work, position, None)

    def _write(self, work: Work) -> None:
        sequence = work.sequence
        before = self._slot(work, work.begin - 1)[3] if work.begin else 0
        first = sequence.start + work.begin
        for position, token in enumerate(sequence.tokens[first : first + work.count], work.begin):
            before = hash((before, token))
            self._put(work, position, (token, position, sequence.request.salt, before))

    def _read(self, work: Work) -> int:
        """The hash of all that the last token of a work sees, each slot of which must be right."""
        sequence, end = work.sequence, work.begin + work.count
        window = sequence.tokens[sequence.start : sequence.start + end]
        chains = chain(window)
        salt = sequence.request.salt
        expected = [
            (token, i, salt, hashed) for i, (token, hashed) in enumerate(zip(window, chains, strict=True))
        ]
        seen = [slot for page in sequence.pages for slot in self.pages[page]][:end]
        if seen != expected:
            self.fault = StaleSlotError(f"{sequence.arrival} sees {seen} instead of {expected}")
            raise self.fault
        return chains[-1]

    def _slot(self, work: Work, position: int) -> Slot:
        slot = self.pages[work.sequence.pages[position // self.page_size]][position % self.page_size]
        if slot is None:
            self.fault = StaleSlotError(f"{work.sequence.arrival} continues after an empty slot, {position}")
            raise self.fault
        return slot

    def _put(self, work: Work, position: int, slot: Slot | None) -> None:
        page = work.sequence.pages[position // self.page_size]
        if self.pages[page] is self._nothing:
            self.pages[page] = list(self._nothing)
        self.pages[page][position % self.page_size] = slot

    def _draw(self, work: Work, hashed: int) -> Drawn:
        token = _token(hashed, work.sequence.uniform)
        return Drawn(token, logprob_of(token, work.sequence.request))


def chain(window: Several[int]) -> list[int]:
    """For each position the hash of the tokens up to it."""
    return list(accumulate(window, lambda before, token: hash((before, token)), initial=0))[1:]


def _token(hashed: int, uniform: float) -> int:
    return hash((hashed, uniform)) % len(VOCABULARY)


def logprob_of(token: int, request: GenerationRequest) -> TokenLogprob | None:
    if request.top_logprobs is None:
        return None
    return TokenLogprob(token, -1.0 - token, tuple((i, -2.0) for i in range(request.top_logprobs)))


@dataclass(frozen=True, slots=True)
class Answer:
    """All that a choice gives when nothing disturbs it."""

    token_ids: tuple[int, ...]
    text: str
    finish: FinishReason


def alone(request: GenerationRequest, choice: int, capacity: int, end_of_text_id: int | None) -> Answer:
    """What one choice of a request must give, whatever else is going on."""
    seed = request.sampling.seed
    if choice:
        seed = int.from_bytes(blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest(), "big")
    random = Random(seed)
    window, generated = list(request.prompt_ids)[-capacity:], []
    while True:
        token = _token(chain(window)[-1], random.random() if request.sampling.temperature else 0.0)
        if token == end_of_text_id:
            return Answer(tuple(generated), text_of(generated, request.stop), "stop")
        generated.append(token)
        window.append(token)
        if is_stopped(generated, request.stop):
            return Answer(tuple(generated), text_of(generated, request.stop), "stop")
        is_full = request.overflow == "stop" and len(window) == capacity
        if len(generated) == request.max_new_tokens or is_full:
            return Answer(tuple(generated), text_of(generated, request.stop), "length")
        if len(window) > capacity:
            window = window[-capacity:] if request.overflow == "slide" else window[-((capacity + 1) // 2) :]


def text_of(token_ids: Several[int], stop: Several[str]) -> str:
    """The text of tokens that are all there will be, cut before the first stop string to be completed."""
    return cut(b"".join(VOCABULARY[token] for token in token_ids).decode("utf-8", "replace"), stop)


def is_stopped(token_ids: Several[int], stop: Several[str]) -> bool:
    """Whether a stop string is complete in the characters that are."""
    text = getincrementaldecoder("utf-8")("replace").decode(
        b"".join(VOCABULARY[token] for token in token_ids)
    )
    return any(string in text for string in stop)


def cut(text: str, stop: Several[str]) -> str:
    """The text before the first stop string to be completed, the longest of those completed together."""
    for end in range(1, len(text) + 1):
        completed = [string for string in stop if text[:end].endswith(string)]
        if completed:
            return text[: end - max(map(len, completed))]
    return text
