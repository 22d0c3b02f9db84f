"""The head of a GGUF file, version 3: its fields and what it says of its tensors."""

import struct
from enum import IntEnum
from typing import Any

import numpy as np

from riftco.interchange.errors import InterchangeError

_MAXIMUM_FIELDS = 4096
_MAXIMUM_TENSORS = 8192
_MAXIMUM_DIMENSIONS = 4


class Kind(IntEnum):
    """The types of fields, as files number them."""

    UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = range(
        13
    )

    @property
    def format(self) -> str:
        """Of a number, as `struct` and NumPy name it."""
        return "BbHhIif?__Qqd"[self]


class GgufReader:
    """`fields` by key, `tensors` as (name, type, shape), and where the head ends.

    InterchangeError for whatever is not such a head. No length in the file is believed before there are that
    many bytes.
    """

    def __init__(self, data: bytes) -> None:
        self.data, self.end = data, 0
        if self._take(4) != b"GGUF":
            raise InterchangeError("magic", "it does not begin as GGUF files do")
        if (version := self._number(Kind.UINT32)) != 3:
            raise InterchangeError("version", f"GGUF version {version}; only version 3 can be read")
        tensor_count = self._count("tensors", _MAXIMUM_TENSORS)
        field_count = self._count("fields", _MAXIMUM_FIELDS)
        self.fields: dict[str, Any] = {}
        for _ in range(field_count):
            key = self._text()
            if key in self.fields:
                raise InterchangeError("fields", f"the field {key!r} occurs twice")
            self.fields[key] = self._value(self._kind())
        self.tensors = [self._tensor() for _ in range(tensor_count)]

    def _tensor(self) -> tuple[str, int, tuple[int, ...]]:
        name, dimensions = self._text(), self._number(Kind.UINT32)
        if dimensions > _MAXIMUM_DIMENSIONS:
            raise InterchangeError("tensors", f"{name}: {dimensions} dimensions, more than GGUF has")
        shape = tuple(self._number(Kind.UINT64) for _ in range(dimensions))[::-1]
        kind = self._number(Kind.UINT32)
        self._number(Kind.UINT64)  # where it begins, which follows from the sizes before it
        return name, kind, shape

    def _value(self, kind: Kind) -> Any:
        if kind == Kind.STRING:
            return self._text()
        if kind != Kind.ARRAY:
            return self._number(kind)
        element, count = self._kind(), self._number(Kind.UINT64)
        if element == Kind.ARRAY:
            raise InterchangeError("fields", "an array of arrays")
        if element == Kind.STRING:
            self._require(8 * count)
            return [self._text() for _ in range(count)]
        size = struct.calcsize("<" + element.format)
        return np.frombuffer(self._take(size * count), f"<{np.dtype(element.format).str[1:]}").tolist()

    def _kind(self) -> Kind:
        number = self._number(Kind.UINT32)
        if number >= len(Kind):
            raise InterchangeError("fields", f"there is a field of the unknown type {number}")
        return Kind(number)

    def _count(self, what: str, most: int) -> int:
        count: int = self._number(Kind.UINT64)
        if count > most:
            raise InterchangeError(what, f"{count} {what}, more than {most}")
        return count

    def _text(self) -> str:
        return self._take(self._number(Kind.UINT64)).decode()

    def _number(self, kind: Kind) -> Any:
        form = "<" + kind.format
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _take(self, size: int) -> bytes:
        self._require(size)
        taken = self.data[self.end : self.end + size]
        self.end += size
        return taken

    def _require(self, size: int) -> None:
        if size > len(self.data) - self.end:
            raise InterchangeError("truncated", f"it ends after {len(self.data)} bytes, in its head")
