"""One token id per byte value, for the bytes that a vocabulary lists."""

from artifacts import TokenizerSpec
from riftco.errors import TokenizerError


def distinct_bytes(corpus: bytes) -> tuple[int, ...]:
    """The byte values that occur in a corpus, ascending."""
    return tuple(sorted(set(corpus)))


class ByteCodec:
    """Encodes by table; the order of the spec's bytes defines the ids."""

    def __init__(self, spec: TokenizerSpec) -> None:
        """Take the state of a byte tokenizer."""
        self.spec = spec
        self._known = bytes(spec.byte_vocabulary or ())
        self.pieces = tuple(bytes((value,)) for value in self._known)
        self._ids = bytes.maketrans(self._known, bytes(range(len(self._known))))

    def encode(self, data: bytes) -> list[int]:
        """Token ids, one per byte. Raises TokenizerError naming the first byte the vocabulary lacks."""
        unknown = data.translate(None, delete=self._known)
        if unknown:
            raise TokenizerError(
                f"byte {unknown[0]} (0x{unknown[0]:02x}) at offset {data.index(unknown[0])} is not in the "
                f"tokenizer's vocabulary of {len(self._known)} bytes; use text whose bytes occur in its "
                "corpus, or method 'bpe', which knows every byte"
            )
        return list(data.translate(self._ids))
