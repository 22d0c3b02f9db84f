"""Byte-pair encoding: the rules of a list applied in order, exactly, through the Rust `tokenizers` library.

The contract is one left-to-right, non-overlapping replacement pass over the whole sequence per rule, in list
order. The library instead keeps merging the pair of lowest rank, the leftmost of several first. The two
agree: a rule's operands have smaller ids than its result, so merging by rule k makes only pairs whose rules
come after k. While k is being merged no earlier rule can apply again and no new place for k appears, so the
library finishes k, left to right, before it goes on. A byte is handed over as the code point of its value.

The library names symbols by their bytes, so it can hold only rules whose pieces are distinct. Rules learned
from a corpus are: bytes that end up as one symbol merged without their surroundings, hence the same way
everywhere. A list made by hand may spell one byte string twice; it is applied with `MergeableSequence`.

Long texts are cut first, because the library slows down as its linked list outgrows the processor's cache:
2 MB as one word took about three times as long as in pieces of 1 kB. A merge across a place between bytes x
and y needs a rule whose left piece ends in x and whose right piece begins with y. Without such a rule nothing
ever merges there and both sides encode independently: the rules themselves say where it is safe to cut. In
English text two places in five are safe with 512 ids and one in five with 4,096. Where none is, as in one
long run of a letter, the text stays whole, which is slower but never quadratic.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from artifacts import TokenizerSpec
from riftco.errors import TokenizerError
from riftco.tokenizer.bpe_training import MergeRule
from riftco.tokenizer.merging import MergeableSequence

_CHUNK_LENGTH = 1000  # bytes; 500 to 4,000 are equally fast
_MAXIMUM_PIECE_BYTES = 2**28


class BpeCodec:
    """Encodes any bytes with a list of merge rules."""

    def __init__(self, spec: TokenizerSpec) -> None:
        """Take the state of a bpe tokenizer. TokenizerError if its pieces do not fit in memory."""
        self.spec = spec
        self._rules = spec.merge_rules or ()
        self.pieces = _spell(self._rules)
        self._pieces_are_distinct = len(set(self.pieces)) == len(self.pieces)

    def encode(self, data: bytes) -> list[int]:
        """Token ids of the bytes."""
        if not self._pieces_are_distinct:
            return _encode_by_passes(data, self._rules)
        return [token.id for chunk in self._chunks(data) for token in self._library.tokenize(chunk)]

    def _chunks(self, data: bytes) -> Iterator[str]:
        """The data as Latin-1 text, cut at the first safe place after every 1,000 bytes."""
        text = data.decode("latin-1")
        if len(text) <= _CHUNK_LENGTH:
            return iter((text,))
        symbols = np.frombuffer(data, dtype=np.uint8)
        safe = np.flatnonzero(~self._merges_across[symbols[:-1], symbols[1:]]) + 1
        nearest = np.searchsorted(safe, np.arange(_CHUNK_LENGTH, len(data), _CHUNK_LENGTH))
        cuts = np.unique(safe[nearest[nearest < len(safe)]]).tolist()
        return (text[start:end] for start, end in pairwise((0, *cuts, len(text))))

    @cached_property
    def _merges_across(self) -> np.ndarray:
        """bool [256, 256]: whether any rule can merge across a place between bytes x and y."""
        table = np.zeros((256, 256), dtype=bool)
        for left, right, _ in self._rules:
            table[self.pieces[left][-1], self.pieces[right][0]] = True
        return table

    @cached_property
    def _library(self) -> Any:
        """The library's bare model: no normaliser, no added tokens, and no threads to survive a fork."""
        from tokenizers.models import BPE  # only those who encode pay for the import

        names = [piece.decode("latin-1") for piece in self.pieces]
        vocabulary = {name: token_id for token_id, name in enumerate(names)}
        return BPE(vocabulary, [(names[left], names[right]) for left, right, _ in self._rules])


def _spell(rules: Sequence[MergeRule]) -> tuple[bytes, ...]:
    """The bytes of every id."""
    pieces = [bytes((value,)) for value in range(256)]
    total = 0
    for left, right, result in rules:
        # Forty rules that each double the last would spell a terabyte.
        total += len(pieces[left]) + len(pieces[right])
        if total > _MAXIMUM_PIECE_BYTES:
            raise TokenizerError(
                f"the merge rules up to id {result} spell {total} bytes, over the limit of "
                f"{_MAXIMUM_PIECE_BYTES}; rules learned from a text of ordinary size stay far below it"
            )
        pieces.append(pieces[left] + pieces[right])
    return tuple(pieces)


def _encode_by_passes(data: bytes, rules: Sequence[MergeRule]) -> list[int]:
    """Token ids by one replacement pass per rule, which touches only the places where the rule applies."""
    sequence = MergeableSequence(data)
    slots = sequence.byte_pairs()
    for left, right, result in rules:
        pair = left, right
        if pair in slots:
            slots |= sequence.merge(pair, sequence.occurrences(pair, slots.pop(pair)), result)
    return sequence.symbols()
