"""The tokenizer that models, training and serving hold: fits or restores a codec and guards its use.

There is no normalisation, no padding and, unless asked for, no special token: every id stands for bytes, so
no content can be mistaken for a control token. The exception, end of text, stands for the byte 0xFF, which no
UTF-8 text contains: it is the last id of a vocabulary, if that is byte 255 (byte) or the merge of 255 with
itself (bpe). That is state which bundles always had, so older readers load it too.
"""

import operator
from collections.abc import Iterable
from typing import NoReturn, Self

from artifacts import TokenizerSpec
from riftco.errors import TokenizerError
from riftco.tokenizer.bpe_codec import BpeCodec
from riftco.tokenizer.bpe_training import MergeRule, train_merge_rules
from riftco.tokenizer.byte_codec import ByteCodec, distinct_bytes

BytesLike = bytes | bytearray | memoryview

_DEFAULT_BPE_VOCABULARY_SIZE = 512
_DEFAULT_PAIR_FREQUENCY = 2
_END_OF_TEXT_BYTE = 255


class Tokenizer:
    """Maps between text or bytes and token ids; immutable, safe to share between threads until closed."""

    def __init__(
        self,
        corpus: str | BytesLike,
        *,
        method: str = "byte",
        vocabulary_size: int | None = None,
        minimum_pair_frequency: int = _DEFAULT_PAIR_FREQUENCY,
        end_of_text: bool = False,
    ) -> None:
        """Fit on a corpus, which is one sequence: merges may span words, lines and characters.

        method: "byte" (the distinct bytes of the corpus, ascending) or "bpe" (all 256 bytes and merges).
        vocabulary_size: most ids a bpe tokenizer may have, 256 to 2**32 - 1, 512 by default; the corpus may
            yield fewer.
        minimum_pair_frequency: how often a pair must occur, overlaps included, for bpe to merge it.
        end_of_text: whether the last id is a token that no text encodes to; it counts as one of the ids.

        Raises TypeError or ValueError for a wrong argument and TokenizerError for a corpus that is empty or,
        with end_of_text, holds the byte 0xFF.
        """
        _check_settings(method, vocabulary_size, minimum_pair_frequency, end_of_text)
        data = _utf8(corpus) if isinstance(corpus, str) else _bytes("corpus", corpus)
        if not data:
            raise TokenizerError("the corpus is empty; a tokenizer needs at least one byte to learn from")
        if end_of_text and _END_OF_TEXT_BYTE in data:
            raise TokenizerError("the corpus holds the byte 0xFF, which is end_of_text's; give UTF-8 text")
        if method == "byte":
            last = (_END_OF_TEXT_BYTE,) if end_of_text else ()
            spec = TokenizerSpec("byte", byte_vocabulary=distinct_bytes(data) + last)
        else:
            size = _DEFAULT_BPE_VOCABULARY_SIZE if vocabulary_size is None else vocabulary_size
            rules = train_merge_rules(data, size - end_of_text, minimum_pair_frequency)
            if end_of_text:
                rules += ((_END_OF_TEXT_BYTE, _END_OF_TEXT_BYTE, 256 + len(rules)),)
            spec = TokenizerSpec("bpe", merge_rules=rules)
        self._codec: ByteCodec | BpeCodec | None = _codec(spec)

    @classmethod
    def from_spec(cls, spec: TokenizerSpec) -> Self:
        """The tokenizer a bundle describes. TokenizerError if its merge rules spell absurdly long pieces."""
        tokenizer = cls.__new__(cls)
        tokenizer._codec = _codec(spec)
        return tokenizer

    @property
    def spec(self) -> TokenizerSpec:
        """The state to store in a bundle."""
        return self._open().spec

    @property
    def method(self) -> str:
        """`byte` or `bpe`."""
        return self.spec.method

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return len(self.vocabulary)

    @property
    def end_of_text_id(self) -> int | None:
        """The id that ends a document and that no text encodes to; None without one."""
        if self.spec.byte_vocabulary is not None:
            found = self.spec.byte_vocabulary[-1] == _END_OF_TEXT_BYTE
        else:
            last_rule = (self.spec.merge_rules or (None,))[-1]
            found = last_rule is not None and last_rule[:2] == (_END_OF_TEXT_BYTE, _END_OF_TEXT_BYTE)
        return self.vocab_size - 1 if found else None

    @property
    def vocabulary(self) -> tuple[bytes, ...]:
        """The bytes each id stands for."""
        return self._open().pieces

    @property
    def vocabulary_bytes(self) -> bytes:
        """The bytes of a byte tokenizer in id order; RuntimeError for bpe."""
        if self.spec.byte_vocabulary is None:
            raise RuntimeError("a bpe tokenizer has no vocabulary_bytes: it knows all 256; see merge_rules")
        return bytes(self.spec.byte_vocabulary)

    @property
    def merge_rules(self) -> tuple[MergeRule, ...]:
        """The (left, right, result) ids of a bpe tokenizer by rank; RuntimeError for byte."""
        if self.spec.merge_rules is None:
            raise RuntimeError("a byte tokenizer has no merge_rules; see vocabulary_bytes")
        return self.spec.merge_rules

    def encode(self, text: str) -> list[int]:
        """Token ids of the UTF-8 bytes of a text; `""` gives `[]`.

        Raises TokenizerError for a byte the vocabulary lacks or a lone surrogate, TypeError for bytes.
        """
        if not isinstance(text, str):
            raise TypeError(f"encode takes str, got {type(text).__name__}; encode_bytes takes bytes")
        return self._open().encode(_utf8(text))

    def encode_bytes(self, data: BytesLike) -> list[int]:
        """Token ids of raw bytes, which need not be UTF-8. Raises as `encode` does, TypeError for str."""
        return self._open().encode(_bytes("data", data))

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        """Token ids of each text on its own."""
        if isinstance(texts, str):
            raise TypeError("encode_batch takes several texts, got one str; use encode")
        return [self.encode(text) for text in texts]

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of token ids; UnicodeDecodeError if their bytes are not UTF-8, else as `decode_bytes`."""
        return self.decode_bytes(token_ids).decode("utf-8")

    def decode_bytes(self, token_ids: Iterable[int]) -> bytes:
        """The exact bytes of token ids. Raises TokenizerError for an id outside the vocabulary."""
        pieces = self.vocabulary
        checked = [operator.index(token_id) for token_id in token_ids]
        if checked and (min(checked) < 0 or max(checked) >= len(pieces)):
            position, outside = next((i, t) for i, t in enumerate(checked) if not 0 <= t < len(pieces))
            raise TokenizerError(
                f"token id {outside} at position {position} is out of range: "
                f"the ids are 0 to {len(pieces) - 1}"
            )
        return b"".join([pieces[token_id] for token_id in checked])

    def close(self) -> None:
        """Let go of the vocabulary; any later use but `close` raises RuntimeError."""
        self._codec = None

    def __enter__(self) -> Self:
        """The tokenizer itself, closed on leaving."""
        self._open()
        return self

    def __exit__(self, *exception: object) -> None:
        """Close."""
        self.close()

    def __repr__(self) -> str:
        """Method and size, or that it is closed."""
        if self._codec is None:
            return "Tokenizer(closed)"
        return f"Tokenizer(method={self.method!r}, vocab_size={self.vocab_size})"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be copied or pickled: `spec` is the state that travels."""
        raise TypeError("a Tokenizer cannot be copied or pickled; pass its spec and use Tokenizer.from_spec")

    def _open(self) -> ByteCodec | BpeCodec:
        if self._codec is None:
            raise RuntimeError("the tokenizer is closed; open another with Tokenizer.from_spec")
        return self._codec


def _check_settings(
    method: str, vocabulary_size: int | None, minimum_pair_frequency: int, end_of_text: bool
) -> None:
    if not isinstance(end_of_text, bool):
        raise TypeError(f"end_of_text must be True or False, got {end_of_text!r}")
    if method not in ("byte", "bpe"):
        raise ValueError(f"tokenizer method must be 'byte' or 'bpe', got {method!r}")
    if method == "byte" and vocabulary_size is not None:
        raise ValueError("vocabulary_size belongs to method 'bpe'; a byte vocabulary follows from the corpus")
    if method == "byte" and minimum_pair_frequency != _DEFAULT_PAIR_FREQUENCY:
        raise ValueError("minimum_pair_frequency belongs to method 'bpe'; a byte tokenizer merges no pairs")
    if vocabulary_size is not None:
        _require_integer("vocabulary_size", vocabulary_size, 256 + end_of_text, 2**32 - 1)
    _require_integer("minimum_pair_frequency", minimum_pair_frequency, 1, None)


def _require_integer(what: str, value: int, lowest: int, highest: int | None) -> None:
    if type(value) is not int:
        raise TypeError(f"{what} must be an integer, got {value!r}")
    if value < lowest or (highest is not None and value > highest):
        bounds = f"at least {lowest}" if highest is None else f"{lowest} to {highest}"
        raise ValueError(f"{what} must be {bounds}, got {value}")


def _codec(spec: TokenizerSpec) -> ByteCodec | BpeCodec:
    return ByteCodec(spec) if spec.method == "byte" else BpeCodec(spec)


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"character {error.start} of the text is the lone surrogate {text[error.start]!a}, "
            "which has no UTF-8 form; replace it first"
        ) from error


def _bytes(what: str, data: BytesLike) -> bytes:
    if isinstance(data, bytes):
        return data
    try:
        return memoryview(data).tobytes()
    except TypeError:
        raise TypeError(f"{what} must be bytes-like, got {type(data).__name__}") from None
