"""`document_rows`: each row of a batch is one document, and every document is seen equally often.

A document is framed as newline + document + end, each part encoded on its own: a lone newline is where a
document begins, and a BPE merge can never swallow it. The end is the tokenizer's end-of-text token or, where
it has none, a newline again. Positions start at 0 in every row, so what the model learns at a position is
what it meets there when it generates. Random windows over the same text teach it to start in mid-sentence.
"""

import random
import struct
from abc import abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from artifacts import RandomState
from riftco.log import LOGGER
from riftco.tokenizer import Tokenizer
from riftco.training.batches import SequenceSource, TokenSequence, TrainingBatch, at_least
from riftco.training.ranks import is_leader

SEPARATOR = "\n"  # one byte, hence one token in either tokenizer


class Span(NamedTuple):
    """A run of a source's flat tokens; the first `context` of them (at least 1) are never targets."""

    start: int
    length: int
    context: int = 1


class DocumentSource(SequenceSource):
    """Whole sequences, in epochs: each comes up once before any comes up again.

    Row r of batch k is place k * B + r in an endless list of epochs, and what an epoch holds is a function of
    (seed, epoch): the batch count is the only state. A sequence longer than C + 1 gives a window with at
    least one target; its place is a function of (seed, epoch, sequence). `contexts` says how many tokens at
    the start of each sequence are never targets: 1 unless given, as nothing precedes the first.
    """

    def __init__(
        self,
        sequences: Sequence[TokenSequence],
        *,
        batch_size: int,
        context_size: int,
        random_seed: int,
        contexts: Sequence[int] | None = None,
    ) -> None:
        if not sequences:
            raise ValueError("there are no documents to train on; give at least one")
        self.contexts = list(contexts) if contexts is not None else [1] * len(sequences)
        pairs = zip(sequences, self.contexts, strict=True)
        if idle := sum(len(sequence) <= at_least(1, context, "contexts") for sequence, context in pairs):
            raise ValueError(
                f"{idle} documents have nothing to predict (one token, or context only); drop them"
            )
        super().__init__(sequences, batch_size=batch_size, context_size=context_size)
        self.random_seed = at_least(0, random_seed, "random_seed")
        self._epoch = -1
        self._rows: list[list[int]] = []

    @property
    @abstractmethod
    def rows_per_epoch(self) -> int:
        """How many rows hold every sequence once."""

    @abstractmethod
    def _deal(self, epoch: int) -> list[list[int]]:
        """The sequences that each row of an epoch holds."""

    @abstractmethod
    def _batch(self, rows: list[list[Span]]) -> TrainingBatch:
        """A batch of these rows."""

    def next_batch(self) -> TrainingBatch:
        first = self.batches_emitted * self.batch_size
        rows = [self._row(place) for place in range(first, first + self.batch_size)]
        self.batches_emitted += 1
        return self._batch(rows)

    def _random_state(self) -> RandomState:
        """Of a generator that is never drawn from: the format wants one, and it tells seeds apart."""
        return RandomState.from_python(random.Random(self.random_seed).getstate())

    def _set_random_state(self, state: RandomState) -> None:
        if state != self._random_state():
            raise ValueError(
                f"the state is of a batch source with another random_seed than {self.random_seed}, which "
                "decides the order of the documents; build it with the same"
            )

    def _row(self, place: int) -> list[Span]:
        epoch, index = divmod(place, self.rows_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._rows = epoch, self._deal(epoch)
        return [self._span(epoch, sequence) for sequence in self._rows[index]]

    def _identity(self) -> bytes:
        masked = any(context > 1 for context in self.contexts)
        return struct.pack(f"<{len(self.contexts)}Q", *self.contexts) if masked else b""

    def _span(self, epoch: int, sequence: int) -> Span:
        """The whole sequence, or its window of C + 1 tokens in this epoch."""
        start, length, context = self.starts[sequence], self.lengths[sequence], self.contexts[sequence]
        width = self.context_size + 1
        if length <= width:
            return Span(start, length, context)
        place_of = random.Random(f"window:{self.random_seed}:{epoch}:{sequence}")
        earliest = max(0, context - self.context_size)  # an earlier window would end within the context
        offset = earliest + place_of.randrange(length - width - earliest + 1)
        return Span(start + offset, width, max(1, context - offset))

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self.lengths)))
        random.Random(f"epoch:{self.random_seed}:{epoch}").shuffle(order)
        return order


class DocumentRowsBatchSource(DocumentSource):
    """Each row is one sequence, padded to the longest of its batch; an epoch is a shuffle of all."""

    source_type = "document_rows"

    @property
    def rows_per_epoch(self) -> int:
        return len(self.lengths)

    def _deal(self, epoch: int) -> list[list[int]]:
        return [[sequence] for sequence in self._shuffled(epoch)]

    def _batch(self, rows: list[list[Span]]) -> TrainingBatch:
        return padded_batch(self.tokens, [span for (span,) in rows])


def frame_documents(tokenizer: Tokenizer, documents: Sequence[str]) -> list[list[int]]:
    """Token ids of newline + document + end, each part encoded on its own.

    TokenizerError when the vocabulary lacks a byte of a document or the newline itself.
    """
    separator = tokenizer.encode(SEPARATOR)
    end = separator if tokenizer.end_of_text_id is None else [tokenizer.end_of_text_id]
    return [separator + ids + end for ids in tokenizer.encode_batch(list(documents))]


def log_pieces(sequences: Sequence[TokenSequence], context_size: int, *, what: str, remedy: str) -> None:
    """Say, once for all ranks, how many of the sequences are longer than C + 1 and so come up in windows."""
    needed = [len(sequence) - 1 for sequence in sequences if len(sequence) > context_size + 1]
    if needed and is_leader():
        LOGGER.info(
            f"{len(needed):,} of {len(sequences):,} {what} are longer than context_size {context_size:,} "
            f"(the longest needs {max(needed):,}) and are learned in pieces; {remedy}"
        )


def document_batches(
    sequences: Sequence[TokenSequence], *, batch_size: int, context_size: int
) -> list[TrainingBatch]:
    """The sequences in order as padded batches, each cut to its first C + 1 tokens; the last may be small."""
    rows = [torch.as_tensor(sequence, dtype=torch.int64)[: context_size + 1] for sequence in sequences]
    return [rows_batch(rows[first : first + batch_size]) for first in range(0, len(rows), batch_size)]


def rows_batch(rows: Sequence[Tensor]) -> TrainingBatch:
    """One padded batch of int64 rows of at least 2 ids."""
    lengths = [len(row) for row in rows]
    starts = list(accumulate(lengths, initial=0))[:-1]
    return padded_batch(torch.cat(list(rows)), list(map(Span, starts, lengths)))


def padded_batch(tokens: Tensor, spans: Sequence[Span]) -> TrainingBatch:
    """Each span of the flat tokens as a row, padded to the longest of them and masked.

    A row is padded with its own last id. Padding is told apart by position, never by id, so it needs no id
    of its own; being causal, no counted position ever sees it.
    """
    starts, lengths, contexts = (column[:, None] for column in torch.tensor(spans).unbind(1))
    positions = torch.arange(int(lengths.max()))
    rows = tokens[starts + torch.minimum(positions, lengths - 1)]
    return TrainingBatch.shifted(rows, ((positions >= contexts) & (positions < lengths))[:, 1:])
