"""A byte sequence in which all occurrences of a pair merge in time proportional to their number.

Training and encoding by byte-pair merging ask the same two questions again and again: where does this pair
stand, and which pairs appear once it is merged? Two facts make the answers cheap.

1. The sequence is a doubly linked list in flat arrays: a slot holds a symbol and the numbers of the slots
   before and after it. A merge writes the new symbol into the left slot and unlinks the right one. Slots
   never move, so numpy handles all occurrences of a pair at once.
2. A pair can only come into being while its larger symbol is made, because that symbol is the newest then.
   So the slots where a pair stands are collected once; later they can only stop being occurrences. Those
   whose symbols are unchanged are the occurrences, exactly and in order, and the number collected is an
   upper bound of their count.

The alternative is a table of counts that every merge keeps up to date. It needs care where occurrences touch
(`abab`, `aaaa`), and nearly all of its counts are never looked at: most pairs never become the best one.

Work: proportional to the merges made plus the slots collected, not to rules times length. Memory: 12 bytes
for each byte and 4 for each collected slot; 38 bytes for each byte (measured) while the bytes are sorted, at
the start. From 2 GiB on slots are twice as large.
"""

from collections.abc import Iterator

import numpy as np

Pair = tuple[int, int]

_END = -1  # the slot behind the last byte: nothing merges with it
_UNLINKED = -2  # a slot that became part of the slot before it


class MergeableSequence:
    """The symbols of a text, its bytes at first."""

    def __init__(self, data: bytes) -> None:
        """One slot a byte and one for the end."""
        slot_type = np.int32 if len(data) < 2**31 - 1 else np.int64
        self._symbols: np.ndarray = np.full(len(data) + 1, _END, dtype=slot_type)
        self._symbols[:-1] = np.frombuffer(data, dtype=np.uint8)
        # Before the first slot comes number -1, which numpy reads as the last slot: the end, as it should be.
        self._before = np.arange(-1, len(data), dtype=slot_type)
        self._after = np.arange(1, len(data) + 2, dtype=slot_type)

    def byte_pairs(self, minimum_count: int = 1) -> dict[Pair, np.ndarray]:
        """Every adjacent pair of bytes that occurs often enough, with the slots of its left halves.

        Overlapping occurrences all count, here and below: `aaa` holds (a, a) twice.
        """
        codes = self._symbols[:-2] * 256 + self._symbols[1:-1]
        lefts = np.arange(len(codes), dtype=codes.dtype)
        groups = _grouped(codes, lefts, minimum_count, largest_key=2**16 - 1)
        return {divmod(code, 256): slots for code, slots in groups}

    def occurrences(self, pair: Pair, slots: np.ndarray) -> np.ndarray:
        """Those of the slots collected for a pair at which it still stands."""
        left, right = pair
        return slots[(self._symbols[slots] == left) & (self._symbols[self._after[slots]] == right)]

    def merge(
        self, pair: Pair, occurrences: np.ndarray, symbol: int, minimum_count: int = 1
    ) -> dict[Pair, np.ndarray]:
        """Replace a pair by a symbol larger than all others, left to right, without overlap.

        Returns every new pair that occurs often enough, with its slots.
        """
        if pair[0] == pair[1]:
            occurrences = self._every_other_of_a_run(occurrences)
        absorbed = self._after[occurrences]
        following = self._after[absorbed]
        self._symbols[occurrences] = symbol
        self._symbols[absorbed] = _UNLINKED
        self._after[occurrences] = following
        self._before[following] = occurrences
        return dict(self._new_pairs(occurrences, symbol, minimum_count))

    def symbols(self) -> list[int]:
        """What the text has become."""
        return self._symbols[self._symbols >= 0].tolist()

    def _every_other_of_a_run(self, occurrences: np.ndarray) -> np.ndarray:
        """The occurrences that a left-to-right pass takes when each may begin where the last one ended."""
        indices = np.arange(len(occurrences))
        starts_run = np.ones(len(occurrences), dtype=bool)
        starts_run[1:] = self._after[occurrences[:-1]] != occurrences[1:]
        run_starts = np.maximum.accumulate(np.where(starts_run, indices, 0))
        return occurrences[(indices - run_starts) % 2 == 0]

    def _new_pairs(
        self, slots: np.ndarray, symbol: int, minimum_count: int
    ) -> Iterator[tuple[Pair, np.ndarray]]:
        following = self._symbols[self._after[slots]]
        inside = following >= 0
        for right, lefts in _grouped(following[inside], slots[inside], minimum_count, symbol):
            yield (symbol, right), lefts
        before = self._before[slots]
        preceding = self._symbols[before]
        inside = preceding >= 0  # (symbol, symbol) comes up on both sides, with the same slots
        for left, lefts in _grouped(preceding[inside], before[inside], minimum_count, symbol):
            yield (left, symbol), lefts


def _grouped(
    keys: np.ndarray, slots: np.ndarray, minimum_count: int, largest_key: int
) -> Iterator[tuple[int, np.ndarray]]:
    """The slots of each key that occurs often enough, in the order given."""
    # numpy sorts 16-bit keys by radix, several times faster than wider ones.
    order = np.argsort(keys.astype(np.min_scalar_type(largest_key)), kind="stable")
    keys, slots = keys[order], slots[order]
    del order
    no_key = keys.dtype.type(-1)  # of their type, or numpy widens all of them
    bounds = np.flatnonzero(np.diff(keys, prepend=no_key, append=no_key))
    frequent = np.flatnonzero(np.diff(bounds) >= minimum_count)
    starts, ends = bounds[frequent], bounds[frequent + 1]
    for key, start, end in zip(keys[starts].tolist(), starts.tolist(), ends.tolist(), strict=True):
        yield key, slots[start:end]
