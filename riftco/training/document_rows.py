"""`document_rows`: each row of a batch is one document, and every document is seen equally often.

A document is framed as separator + document + separator, with the separator (a newline) encoded on its own:
a lone newline is then both where a story begins and where it ends, and a BPE merge can never swallow it.
Positions start at 0 in every row, so what the model learns at a position is what it meets there when it
generates. Random windows over the same text teach it to start in mid-sentence.
"""

import random
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from riftco.tokenizer import Tokenizer
from riftco.training.batches import SequenceSource, TokenSequence, TrainingBatch, at_least

SEPARATOR = "\n"  # one byte, hence one token in either tokenizer


class DocumentRowsBatchSource(SequenceSource):
    """Rows are whole sequences, in epochs: each comes up once before any comes up again.

    Which rows batch k holds is a pure function of (seed, k): row r is place k * B + r in an endless list of
    epochs, each a shuffle of all sequences seeded by (seed, epoch). So the batch count is the only state. A
    sequence longer than C + 1 gives a window whose place is seeded by (seed, epoch, sequence).
    """

    source_type = "document_rows"

    def __init__(
        self, sequences: Sequence[TokenSequence], *, batch_size: int, context_size: int, random_seed: int
    ) -> None:
        if not sequences:
            raise ValueError("there are no documents to train on; give at least one")
        if short := sum(len(sequence) < 2 for sequence in sequences):
            raise ValueError(f"{short} documents have fewer than 2 tokens, so nothing to predict; drop them")
        super().__init__(sequences, batch_size=batch_size, context_size=context_size)
        self.random_seed = at_least(0, random_seed, "random_seed")
        self._epoch = -1
        self._order: list[int] = []

    def next_batch(self) -> TrainingBatch:
        first = self.batches_emitted * self.batch_size
        rows = [self._row(place) for place in range(first, first + self.batch_size)]
        self.batches_emitted += 1
        starts, lengths = zip(*rows, strict=True)
        return padded_batch(self.tokens, starts, lengths)

    def _row(self, place: int) -> tuple[int, int]:
        """Start and length, in the flat tokens, of the row at a place in the endless list."""
        epoch, index = divmod(place, len(self.lengths))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._shuffled(epoch)
        sequence = self._order[index]
        start, length, width = self.starts[sequence], self.lengths[sequence], self.context_size + 1
        if length <= width:
            return start, length
        place_of = random.Random(f"window:{self.random_seed}:{epoch}:{sequence}")
        return start + place_of.randrange(length - width + 1), width

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self.lengths)))
        random.Random(f"epoch:{self.random_seed}:{epoch}").shuffle(order)
        return order


def frame_documents(tokenizer: Tokenizer, documents: Sequence[str]) -> list[list[int]]:
    """Token ids of separator + document + separator, each part encoded on its own.

    TokenizerError when the vocabulary lacks a byte of a document or the newline itself.
    """
    separator = tokenizer.encode(SEPARATOR)
    return [separator + ids + separator for ids in tokenizer.encode_batch(list(documents))]


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
    return padded_batch(torch.cat(list(rows)), starts, lengths)


def padded_batch(tokens: Tensor, starts: Sequence[int], lengths: Sequence[int]) -> TrainingBatch:
    """Rows `tokens[start : start + length]`, padded to the longest of them and masked.

    A row is padded with its own last id. Padding is told apart by position, never by id, so it needs no id
    of its own; being causal, no counted position ever sees it.
    """
    positions = torch.arange(max(lengths))
    length_column = torch.tensor(lengths)[:, None]
    rows = tokens[torch.tensor(starts)[:, None] + torch.minimum(positions, length_column - 1)]
    return TrainingBatch.shifted(rows, (positions < length_column)[:, 1:])
