"""`packed`: rows full of whole documents that do not see each other, so that hardly a position is padding.

Laid out by targets: a document of n tokens takes n - 1 places, its inputs are all tokens but the last, its
targets all but the first. So no target crosses from one document into the next and no place is spent on a
boundary. `document_starts` tells attention and positions where each document begins. Rows are always C wide:
one shape for the whole run.

Which lengths share a row is settled once, by best fit with the longest first; each epoch then deals the
documents of each length out anew and shuffles the rows. So every epoch has equally many rows, and batch k is
a function of (seed, k) that no earlier batch need be replayed for. Documents of one length change rows from
epoch to epoch, one of a length of its own keeps its neighbours; as they do not see each other, a neighbour is
only a document of the same batch.
"""

import random
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from riftco.training.batches import TrainingBatch
from riftco.training.document_rows import DocumentSource, Span


class PackedRowsBatchSource(DocumentSource):
    """Each row holds as many whole sequences as fit its C places; every sequence comes up once an epoch."""

    source_type = "packed"

    @property
    def rows_per_epoch(self) -> int:
        return len(self._plan)

    @property
    def useful_share(self) -> float:
        """The share of an epoch's places that hold a document rather than padding."""
        return sum(self._sizes) / (len(self._plan) * self.context_size)

    @cached_property
    def _sizes(self) -> list[int]:
        return [min(length - 1, self.context_size) for length in self.lengths]

    @cached_property
    def _plan(self) -> list[list[int]]:
        return pack(self._sizes, self.context_size)

    def _deal(self, epoch: int) -> list[list[int]]:
        of_size: defaultdict[int, list[int]] = defaultdict(list)
        for sequence in self._shuffled(epoch):
            of_size[self._sizes[sequence]].append(sequence)
        rows = [[of_size[size].pop() for size in row] for row in self._plan]
        random.Random(f"rows:{self.random_seed}:{epoch}").shuffle(rows)
        return rows

    def _batch(self, rows: list[list[Span]]) -> TrainingBatch:
        return packed_batch(self.tokens, rows, self.context_size)


def pack(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """The sizes (1 to capacity) in rows that add up to at most the capacity: best fit, longest first.

    Never more than 11/9 of the fewest rows possible and a few (Johnson 1973). Linear once sorted.
    """
    rows: list[list[int]] = []
    with_room: defaultdict[int, list[int]] = defaultdict(list)  # free places to the rows that have them
    rooms = 0  # bit r is set where some row has r free places
    for size in sorted(sizes, reverse=True):
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1  # the lowest bit: the tightest row
            row = with_room[room].pop()
            rooms ^= 0 if with_room[room] else 1 << room
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(size)
        with_room[room - size].append(row)
        rooms |= 1 << (room - size)
    return rows


def packed_batch(tokens: Tensor, rows: Sequence[Sequence[Span]], width: int) -> TrainingBatch:
    """Rows of `width` places, each holding its spans of the flat tokens one after another.

    What is left of a row is padding: it counts for nothing, and each of its places is a document of its own.
    """
    places = [
        row * width + offset
        for row, spans in enumerate(rows)
        for offset in accumulate((span.length - 1 for span in spans[:-1]), initial=0)
    ]
    starts, lengths, contexts = torch.tensor([span for spans in rows for span in spans]).unbind(1)
    counts = lengths - 1
    document = torch.arange(len(counts)).repeat_interleave(counts)
    within = torch.arange(len(document)) - (counts.cumsum(0) - counts)[document]
    first_place = torch.tensor(places)[document]
    place, token = first_place + within, starts[document] + within
    inputs = torch.zeros(len(rows) * width, dtype=torch.int64)
    targets, mask = torch.zeros_like(inputs), torch.zeros(len(inputs), dtype=torch.bool)
    document_starts = torch.arange(width).repeat(len(rows))
    inputs[place], targets[place] = tokens[token], tokens[token + 1]
    mask[place] = within + 1 >= contexts[document]
    document_starts[place] = first_place % width
    return TrainingBatch(*(x.view(len(rows), width) for x in (inputs, targets, mask, document_starts)))
