"""The contract's three samplers: windows of C + 1 tokens at random places, none across two sequences.

Every draw is one `randrange` of Python's Mersenne Twister, in the contract's order, so batches are exact.
"""

import random
from abc import abstractmethod
from bisect import bisect
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import torch

from artifacts import RandomState
from riftco.training.batches import SequenceSource, TokenSequence, TrainingBatch, at_least


class WindowSource(SequenceSource):
    """Windows of the sequences that are long enough; ValueError when none is."""

    def __init__(
        self, sequences: Sequence[TokenSequence], *, batch_size: int, context_size: int, random_seed: int
    ) -> None:
        at_least(1, context_size, "context_size")
        usable = [sequence for sequence in sequences if len(sequence) > context_size]
        if not usable:
            longest = max((len(sequence) for sequence in sequences), default=0)
            raise ValueError(
                f"a context of {context_size} needs a sequence of {context_size + 1} tokens and the longest "
                f"has {longest}; use a smaller context_size or more text"
            )
        super().__init__(usable, batch_size=batch_size, context_size=context_size)
        self._random = random.Random(at_least(0, random_seed, "random_seed"))
        self._windows = self.tokens.unfold(0, context_size + 1, 1)  # a view: row s starts at token s

    def next_batch(self) -> TrainingBatch:
        starts = [self._draw_start() for _ in range(self.batch_size)]
        self.batches_emitted += 1
        return TrainingBatch.shifted(self._windows[torch.tensor(starts)])

    def _random_state(self) -> RandomState:
        return RandomState.from_python(self._random.getstate())

    def _set_random_state(self, state: RandomState) -> None:
        self._random.setstate(state.to_python())

    @abstractmethod
    def _draw_start(self) -> int:
        """Where in the flat tokens a row begins."""


class RandomWindowBatchSource(WindowSource):
    """Windows anywhere in one long sequence."""

    source_type = "random_window"

    def __init__(
        self, tokens: TokenSequence, *, batch_size: int, context_size: int, random_seed: int
    ) -> None:
        super().__init__([tokens], batch_size=batch_size, context_size=context_size, random_seed=random_seed)

    def _draw_start(self) -> int:
        return self._random.randrange(len(self._windows))


class SequenceWindowBatchSource(WindowSource):
    """`window_uniform`: all windows of all sequences are equally likely, so long sequences come up more."""

    source_type = "sequence_window"

    @cached_property
    def _window_ends(self) -> list[int]:
        return list(accumulate(length - self.context_size for length in self.lengths))

    def _draw_start(self) -> int:
        window = self._random.randrange(self._window_ends[-1])
        # Every sequence before this one has context_size more tokens than windows.
        return window + bisect(self._window_ends, window) * self.context_size


class ExampleWindowBatchSource(WindowSource):
    """`example_uniform`: all sequences are equally likely, then all windows of the one drawn."""

    source_type = "example_window"

    def _draw_start(self) -> int:
        sequence = self._random.randrange(len(self.lengths))
        return self.starts[sequence] + self._random.randrange(self.lengths[sequence] - self.context_size)
