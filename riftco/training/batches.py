"""What a batch is, and what all sources of batches share.

A source keeps its tokens in one flat int64 tensor and gathers each batch from it with one index, so
nothing is done per token in Python. B batch, T time, C context size.
"""

import hashlib
import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from artifacts import BatchSourceState, RandomState

TokenSequence = Sequence[int] | Tensor
_TOKEN_LIMIT = 2**32

# More and smaller parts have less padding but slower matrix products; measured on a CPU at 48 rows.
_MOST_PARTS = 4
_LEAST_ROWS_OF_A_PART = 12


@dataclass(frozen=True, slots=True, eq=False)
class TrainingBatch:
    """Inputs and targets, int64 `[B, T]`, and which targets count, bool `[B, T]` (all if None).

    Where rows hold several documents, `document_starts`, int64 `[B, T]`, names for each place the one where
    its document begins; the model sees nothing before it and counts positions from it. ValueError for unequal
    shapes, an empty rectangle, ids outside 0..2^32-1, a mask that selects nothing, or starts of no documents.
    """

    inputs: Tensor
    targets: Tensor
    mask: Tensor | None = None
    document_starts: Tensor | None = None

    def __post_init__(self) -> None:
        shape = self.inputs.shape
        if self.inputs.ndim != 2 or not self.inputs.numel() or self.targets.shape != shape:
            raise ValueError(
                f"inputs and targets must be equal non-empty [B, T] rectangles, "
                f"got {list(shape)} and {list(self.targets.shape)}"
            )
        for name, ids in (("inputs", self.inputs), ("targets", self.targets)):
            _check_ids(name, ids)
        if self.mask is not None:
            _check_mask(self.mask, shape)
        if self.document_starts is not None:
            _check_starts(self.document_starts, shape)

    @property
    def counted(self) -> int:
        """How many targets count."""
        return self.targets.numel() if self.mask is None else int(self.mask.sum())

    def parts(self) -> Iterator["TrainingBatch"]:
        """The batch cut into groups of rows of like length, each only as wide as its last counted target.

        What is cut off counts for nothing and nothing that counts can see it, so the parts' losses, weighted
        by their counted targets, add up to the batch's. Without a mask, or with rows packed full of
        documents, the batch is its own one part.
        """
        if self.mask is None or self.document_starts is not None:
            yield self
            return
        widths = _widths(self.mask)
        row_count = max(_LEAST_ROWS_OF_A_PART, math.ceil(len(widths) / _MOST_PARTS))
        for rows in widths.argsort(stable=True).split(row_count):
            if width := int(widths[rows].max()):
                yield TrainingBatch(*(x[rows, :width] for x in (self.inputs, self.targets, self.mask)))

    def flat(self) -> "TrainingBatch":
        """The batch as one row `[1, N]` of its rows up to their last counted targets, each a document.

        Nothing of it is padding, and its loss is the batch's. Without a mask, or with rows packed full of
        documents, the batch itself.
        """
        if self.mask is None or self.document_starts is not None:
            return self
        widths = _widths(self.mask)
        kept = torch.arange(self.mask.shape[1]) < widths[:, None]
        starts = (widths.cumsum(0) - widths).repeat_interleave(widths)
        inputs, targets, mask = (x[kept][None] for x in (self.inputs, self.targets, self.mask))
        return TrainingBatch(inputs, targets, mask, starts[None])

    @classmethod
    def shifted(cls, rows: Tensor, mask: Tensor | None = None) -> "TrainingBatch":
        """A batch from rows of ids `[B, T + 1]`: each target is its input's next token."""
        return cls(rows[:, :-1], rows[:, 1:], mask)


class BatchSource(Protocol):
    """Anything that yields one batch after another, without end."""

    def next_batch(self) -> TrainingBatch: ...


class SequenceSource(ABC):
    """A batch source over token sequences: flat tokens, where each sequence starts, and their identity."""

    source_type: str

    def __init__(self, sequences: Sequence[TokenSequence], *, batch_size: int, context_size: int) -> None:
        self.batch_size = at_least(1, batch_size, "batch_size")
        self.context_size = at_least(1, context_size, "context_size")
        rows = [torch.as_tensor(sequence, dtype=torch.int64) for sequence in sequences]
        self.tokens = torch.cat(rows)
        self.lengths = [len(row) for row in rows]
        self.starts = list(accumulate(self.lengths, initial=0))[:-1]
        self.batches_emitted = 0

    @abstractmethod
    def next_batch(self) -> TrainingBatch:
        """The next `batch_size` rows."""

    def checkpoint_state(self) -> BatchSourceState:
        """Where the source stands, for a checkpoint."""
        return BatchSourceState(
            self.source_type, self.fingerprint, self.batches_emitted, self._random_state()
        )

    def restore_checkpoint_state(self, state: BatchSourceState) -> None:
        """Go on from there: the next batch is the one that would have followed.

        TypeError for what is no state, ValueError, before any change, for that of another kind of source, of
        other data or sizes (told by the fingerprint), or of another seed where the seed decides the order.
        """
        if not isinstance(state, BatchSourceState):
            raise TypeError(f"a batch source goes on from a BatchSourceState, got {type(state).__name__}")
        for name in ("source_type", "fingerprint"):
            theirs, own = getattr(state, name), getattr(self, name)
            if theirs != own:
                raise ValueError(
                    f"the state is of a batch source with {name} {theirs} and this one has {own}; "
                    "build it from the same data, with the same sizes and sampling_strategy"
                )
        self._set_random_state(state.random_state)
        self.batches_emitted = state.batches_emitted

    @abstractmethod
    def _random_state(self) -> RandomState:
        """Of the generator that the next batch is drawn from."""

    @abstractmethod
    def _set_random_state(self, state: RandomState) -> None:
        """Draw the next batch from a generator in this state; ValueError if it cannot be this source's."""

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (64 hex) over type, batch and context size and every usable sequence; not over the seed."""
        digest = hashlib.sha256(b"riftco-transformer-batch-source-v1\0")
        name = self.source_type.encode("ascii")
        digest.update(struct.pack("<Q", len(name)) + name)
        digest.update(struct.pack("<QQQ", self.batch_size, self.context_size, len(self.lengths)))
        for start, length in zip(self.starts, self.lengths, strict=True):
            digest.update(struct.pack("<Q", length))
            digest.update(self.tokens[start : start + length].numpy().astype("<u4").tobytes())
        digest.update(self._identity())
        return digest.hexdigest()

    def _identity(self) -> bytes:
        """What else tells two sources apart; nothing for the contract's."""
        return b""


def fixed_batches(source: BatchSource, count: int) -> tuple[TrainingBatch, ...]:
    """The next `count` batches of a source, drawn once."""
    return tuple(source.next_batch() for _ in range(at_least(1, count, "count")))


def at_least(least: int, value: int, name: str) -> int:
    """The value if it is an integer and not below the least; TypeError or ValueError naming it if not."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return value


def _widths(mask: Tensor) -> Tensor:
    """For each row of a mask `[B, T]` how many places it has up to the last that counts, `[B]`."""
    return torch.where(mask, torch.arange(1, mask.shape[1] + 1), 0).amax(dim=1)


def _check_ids(name: str, ids: Tensor) -> None:
    if ids.dtype != torch.int64:
        raise ValueError(f"{name} must be int64, got {ids.dtype}")
    lowest, highest = (int(bound) for bound in torch.aminmax(ids))
    if lowest < 0 or highest >= _TOKEN_LIMIT:
        raise ValueError(f"{name} must be ids in 0..2^32-1, got {lowest}..{highest}")


def _check_mask(mask: Tensor, shape: torch.Size) -> None:
    if mask.dtype != torch.bool or mask.shape != shape:
        raise ValueError(f"the mask must be bool {list(shape)}, got {mask.dtype} {list(mask.shape)}")
    if not bool(mask.any()):
        raise ValueError("the mask selects no target; a batch needs at least one token to learn")


def _check_starts(starts: Tensor, shape: torch.Size) -> None:
    if starts.dtype != torch.int64 or starts.shape != shape:
        raise ValueError(
            f"document_starts must be int64 {list(shape)}, got {starts.dtype} {list(starts.shape)}"
        )
    places = torch.arange(shape[1])
    begins = starts == places
    goes_on = starts[:, 1:] == starts[:, :-1]
    if not bool(begins[:, 0].all() and (begins[:, 1:] | goes_on).all()):
        raise ValueError("document_starts must name, for each place of a row, where its document begins")
