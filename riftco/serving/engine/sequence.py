"""One choice of a request as the scheduler sees it: its tokens, and how many of them are computed."""

from array import array
from enum import Enum
from hashlib import blake2b
from random import Random
from typing import Self

from riftco.serving.engine.request import FinishReason, GenerationRequest


class State(Enum):
    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    REPLAY = "replay"
    FINISHED = "finished"


class Sequence:
    """Tokens of a prompt and those generated after it.

    Its window, what the model sees, is `tokens[start:]` at positions from 0 on. The first `computed` tokens
    of the window have their keys and values in `pages`: of position p in slot p % page_size of page
    `pages[p // page_size]`.
    """

    def __init__(self, request: GenerationRequest, request_id: int, choice: int, capacity: int) -> None:
        self.request = request
        self.request_id = request_id
        self.choice = choice
        self.arrival = (request_id, choice)
        self.tokens = list(request.prompt_ids)
        self.start = max(0, len(self.tokens) - capacity)
        self.computed = 0
        self.pages: list[int] = []
        self.published = 0
        self._keys: list[bytes] = []
        self.cached_tokens = 0
        self.slid = False
        self.preempted = False
        self.running = False
        self.finish: FinishReason | None = None
        self.leader: Self | None = None
        sampling = request.sampling
        self.greedy = not sampling.temperature and not sampling.penalizes
        self._random: Random | None = None
        self.uniform = 0.0
        if sampling.temperature:
            self._random = Random(sampling.seed if choice == 0 else _choice_seed(sampling.seed, choice))
            self.uniform = self._random.random()

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def generated_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def pending(self) -> int:
        """Tokens of the window that are not yet computed; after them comes a sample."""
        return len(self.tokens) - self.start - self.computed

    @property
    def state(self) -> State:
        if self.finish is not None:
            return State.FINISHED
        if not self.running:
            return State.PREEMPTED if self.preempted else State.QUEUED
        if self.slid and self.pending > 1:
            return State.REPLAY
        return State.DECODE if self.pending == 1 and self.generated_tokens else State.PREFILL

    def append(self, token_id: int) -> None:
        """A sampled token; the next draw gets the next random number."""
        self.tokens.append(token_id)
        if self._random is not None:
            self.uniform = self._random.random()

    def page_keys(self, page_size: int, count: int) -> list[bytes]:
        """Keys of the window's first `count` full pages: hashes of the salt and all tokens up to each end."""
        for index in range(len(self._keys), count):
            begin = self.start + index * page_size
            tokens = array("Q", self.tokens[begin : begin + page_size])
            parent = self._keys[-1] if self._keys else _hash(self.request.salt, b"salt")
            self._keys.append(_hash(parent + tokens.tobytes(), b"page"))
        return self._keys[:count]

    def clear(self) -> None:
        """Nothing is computed any more; the pages were given back."""
        self.computed = self.published = 0
        self.pages = []

    def slide(self, start: int) -> None:
        """The window begins at token `start` now, where every position is another one: compute it anew."""
        self.clear()
        self.start, self.slid, self._keys = start, True, []


def _hash(data: bytes, kind: bytes) -> bytes:
    """16 bytes; of another kind they are others, so that no salt stands for what a page's key is made of."""
    return blake2b(data, digest_size=16, person=kind).digest()


def _choice_seed(seed: int, choice: int) -> int:
    return int.from_bytes(blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest())
